"""metrics.jsonl and samples.jsonl: the run's own record, one JSON object a line, each with its "step".

A line is one unbuffered write, so a killed process leaves at most one torn line, at the end; opening the file again
takes it away. Reading never needs more than a JSON parser.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from shared_runtime.tracking.sink import Metrics, Row, Sink, TrackingError

logger = logging.getLogger(__name__)

_STEP = re.compile(rb'\{"step": ?(-?\d+)[,}]')
_BLOCK = 1 << 16


class JsonlSink(Sink):
    """Appends metrics and samples to two files, flushed row by row.

    Args:
        metrics_path: Usually `metrics.jsonl` of the run directory.
        samples_path: Usually `samples.jsonl` beside it; `None` leaves samples out.
    """

    name = "jsonl"
    required = True

    def __init__(self, metrics_path: Path, samples_path: Path | None = None) -> None:
        self._metrics = JsonlFile(metrics_path)
        self._samples = JsonlFile(samples_path) if samples_path else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one row."""
        self._metrics.append([{"step": step, **metrics}])

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Append one row a sample."""
        if self._samples:
            self._samples.append([{"step": step, **row} for row in rows])

    def truncate_after(self, step: int) -> None:
        """Drop rows later than `step` from both files."""
        self._metrics.truncate_after(step)
        if self._samples:
            self._samples.truncate_after(step)

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        if self._samples:
            self._samples.close()


class JsonlFile:
    """One append-only JSONL file; opening it repairs a torn last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows through to the operating system.

        Raises:
            TrackingError: If they can't be written (disk full, no permission) or hold something JSON has no form for.
        """
        data = b"".join(self._encode(row) + b"\n" for row in rows)
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise TrackingError(f"can't write {self.path}: {error.strerror}") from error

    def truncate_after(self, step: int) -> None:
        """Drop rows later than `step`; the file is replaced at once, or left alone when there is nothing to drop."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        dropped = 0
        with self.path.open("rb") as source, temporary.open("wb") as target:
            for number, line in enumerate(source, 1):
                if self._step_of(line, number) <= step:
                    target.write(line)
                else:
                    dropped += 1
            target.flush()
            os.fsync(target.fileno())
        if not dropped:
            temporary.unlink()
            return
        self._file.close()
        temporary.replace(self.path)
        self._file = self._open()
        logger.info("%s: %d rows after step %d dropped, the run logs them again", self.path, dropped, step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> BinaryIO:
        try:
            _repair(self.path)
            return self.path.open("ab", buffering=0)  # type: ignore[return-value]
        except OSError as error:
            raise TrackingError(f"can't open {self.path}: {error.strerror}") from error

    def _step_of(self, line: bytes, number: int) -> int:
        match = _STEP.match(line)
        if match:
            return int(match[1])
        return int(_parse(line, self.path, number)["step"])

    def _encode(self, row: Mapping[str, Any]) -> bytes:
        try:
            return orjson.dumps(row)
        except TypeError:
            pass  # a path, an array, a lone surrogate: rare, and slow to look for in every row
        try:
            text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode("utf-8", errors="backslashreplace")
        except (TypeError, ValueError) as error:
            raise TrackingError(f"{self.path.name}: a row of step {row.get('step')} is no JSON: {error}") from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; a torn last line, which a live or killed run can leave, is passed over.

    Raises:
        TrackingError: If an earlier line is broken; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and not _is_row(line):
                return
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TrackingError(f"{path}:{number}: not a JSON object: {error}") from error
    if not isinstance(row, dict) or "step" not in row:
        raise TrackingError(f'{path}:{number}: not an object with a "step"')
    return row


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _repair(path: Path) -> None:
    """Cut a torn last line off, or end a whole one with its newline."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        start, tail = _last_line(file)
        if tail.endswith(b"\n"):
            return
        if _is_row(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return
        file.truncate(start)
    logger.warning("%s: dropped a torn last line of %d bytes", path, len(tail))


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Offset and bytes of the last line, its newline included when it has one."""
    position = file.seek(0, os.SEEK_END)
    tail = b""
    while position > 0:
        size = min(_BLOCK, position)
        position -= size
        file.seek(position)
        tail = file.read(size) + tail
        newline = tail.rfind(b"\n", 0, len(tail) - 1)
        if newline >= 0:
            return position + newline + 1, tail[newline + 1 :]
    return 0, tail


def _plain(value: Any) -> Any:
    """`value` as what JSON knows; a float that is not finite becomes null.

    Raises:
        TypeError: If there is no such form.
    """
    if value is None or isinstance(value, bool | int) or type(value) is str:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} ({value!r:.80})")
