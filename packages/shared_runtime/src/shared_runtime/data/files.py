"""Rows out of JSONL and parquet files, with slices such as `train.jsonl@[0:1000]`; every problem has its line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MAX_REPORTED = 10

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]$")


class DataError(ValueError):
    """A data file that can't be used as asked. The message lists the problems with file and line."""


def raise_problems(problems: Sequence[str]) -> None:
    """Raise all problems as one `DataError` (the first few in full, the rest counted); nothing if there are none.

    Raises:
        DataError: If there is a problem.
    """
    if problems:
        more = len(problems) - MAX_REPORTED
        tail = [f"… and {more} more like these"] if more > 0 else []
        raise DataError("\n".join([*problems[:MAX_REPORTED], *tail]))


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a message: the nearest of the known names, and all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}keys there are: {', '.join(sorted(known)) or 'none'}"


def split_slice(spec: str) -> tuple[Path, slice | None]:
    """`"a.jsonl@[10:20]"` is `(Path("a.jsonl"), slice(10, 20))`; without `@[…]` the slice is `None`.

    Raises:
        DataError: If something follows an `@[` that is not a slice.
    """
    match = _SLICE.match(spec)
    if match:
        start, stop = (int(text) if text else None for text in match.group("start", "stop"))
        return Path(match["path"]), slice(start, stop)
    if "@[" in spec and not Path(spec).exists():
        raise DataError(
            f"{spec}: can't read the part after '@' as a slice; write path@[start:stop], as in a.jsonl@[0:9]"
        )
    return Path(spec), None


def read_rows(spec: str, *, flag: str = "") -> tuple[Path, list[tuple[int, Row]]]:
    """Read the rows of a file or of a slice of it.

    Blank lines of a JSONL file are skipped and not counted by a slice. Line numbers start at 1; in a parquet file they
    are row numbers.

    Args:
        spec: Path of a `.parquet` file or a JSONL file (any other ending), with an optional slice `@[start:stop]`.
        flag: The flag that named the file, for messages.

    Returns:
        The path without the slice, and `(line, row)` pairs, at least one.

    Raises:
        DataError: Missing or empty file, a line that is not a JSON object, a slice outside the rows.
        ImportError: Parquet without pyarrow; the message names the extra.
    """
    path, part = split_slice(spec)
    named = f"{flag} {path}".strip()
    if path.is_dir():
        raise DataError(f"{named}: is a directory; give a JSONL or parquet file")
    if not path.exists():
        siblings = [str(p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        raise DataError(f"{named}: no such file" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    rows = _parquet(path, part) if path.suffix == ".parquet" else _jsonl(path, part)
    return path, rows


def _apply(part: slice | None, rows: Sequence[Any], path: Path) -> Sequence[Any]:
    if not rows:
        raise DataError(f"{path}: has no rows")
    if part is None:
        return rows
    chosen = rows[part]
    beyond = max(abs(bound) for bound in (part.start or 0, part.stop or 0)) > len(rows)
    if beyond or not chosen:
        what = "reaches beyond its rows" if beyond else "is empty"
        raise DataError(f"{path}: the slice [{_bound(part.start)}:{_bound(part.stop)}] {what}; it has {len(rows)}")
    return chosen


def _bound(value: int | None) -> str:
    return "" if value is None else str(value)


def _jsonl(path: Path, part: slice | None) -> list[tuple[int, Row]]:
    lines = [(number, line) for number, line in enumerate(path.read_bytes().splitlines(), 1) if line.strip()]
    rows: list[tuple[int, Row]] = []
    problems: list[str] = []
    for number, line in _apply(part, lines, path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}")
            continue
        except UnicodeDecodeError as error:
            problems.append(f"{path}:{number}: not valid UTF-8: {error.reason} at byte {error.start}")
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            kind = "an array" if isinstance(row, list) else repr(row)[:40]
            problems.append(f"{path}:{number}: is {kind}, not a JSON object; write one object a line")
    raise_problems(problems)
    return rows


def _parquet(path: Path, part: slice | None) -> list[tuple[int, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"{path}: reading parquet needs pyarrow: install the extra tandem-shared-runtime[parquet]"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    chosen = _apply(part, range(table.num_rows), path)
    rows = table.slice(chosen[0], len(chosen)).to_pylist()
    return list(zip(range(chosen[0] + 1, chosen[0] + 1 + len(rows)), rows, strict=True))
