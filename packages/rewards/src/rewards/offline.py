"""Score a JSONL file: `rewards score`. What was written stays, so a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rewards.request import RewardError, RewardRequest, Score
from rewards.scoring import score


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the columns. `image` holds a path, or a list of paths for a video, relative to the input file."""

    response: str = "response"
    label: str = "label"
    prompt: str = "prompt"
    metadata: str = "metadata"
    image: str = "image"
    tokens: str = "tokens"
    score: str = "score"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did: rows scored before it, by it, and the mean of all number scores (`None` without any)."""

    resumed: int
    scored: int
    mean: float | None


def score_file(
    source: str | Path,
    target: str | Path,
    rm_type: str | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    keys: Keys | None = None,
    batch_size: int = 64,
    show_progress: bool = False,
) -> Summary:
    """Write each row of `source` with its score to `target`, in order.

    Rows that `target` already has are kept and not scored again; half a last line is dropped first.

    Args:
        source: JSONL; empty lines are skipped.
        target: JSONL; each row of the source with the column `keys.score`.
        rm_type: The reward; a row's `metadata.rm_type` goes before it.
        options: Options of rewards by name.
        keys: The columns.
        batch_size: Rows scored together, and written at once.
        show_progress: Show a bar on standard error.

    Raises:
        RewardError: A line that is no JSON object, a row that cannot be scored (`file:line` names it), or a target
            whose rows are not those of the source.
    """
    keys, source, target = keys or Keys(), Path(source), Path(target)
    if batch_size < 1:
        raise RewardError(f"--batch-size {batch_size} must be at least 1")
    if source.resolve() == target.resolve():
        raise RewardError(f"--output {target} is the input: choose another file")
    total = sum(1 for _ in _rows(source))
    with _open_target(target) as file:
        done, numbers = _check_done(source, file, target, keys)
        rows = _rows(source)
        for _ in range(done):
            next(rows)
        with _progress(total, done, show_progress) as advance:
            for batch in _batches(rows, batch_size):
                requests = [_request(row, f"{source}:{line}", keys, source.parent) for line, row in batch]
                scores = score(requests, rm_type, options=options)
                lines = [json.dumps({**row, keys.score: s}) for (_, row), s in zip(batch, scores, strict=True)]
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
                numbers += [value for s in scores if (value := _number(s)) is not None]
                advance(len(batch))
    return Summary(done, total - done, sum(numbers) / len(numbers) if numbers else None)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a JSONL file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise RewardError(f"{path}:{number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise RewardError(f"{path}:{number} is no JSON object")
            yield number, row


def _open_target(path: Path) -> IO[str]:
    """The target for appending, without half a last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("rb+") as file:
        content_end = 0
        for line in file:
            content_end += len(line) if line.endswith(b"\n") else 0
        file.truncate(content_end)
    return path.open("a+", encoding="utf-8")


def _check_done(source: Path, file: IO[str], target: Path, keys: Keys) -> tuple[int, list[float]]:
    """How many rows the target has, each compared with its source row, and their scores that are numbers."""
    file.seek(0)
    rows, done, numbers = _rows(source), 0, []
    for number, line in enumerate(file, start=1):
        _, row = next(rows, (0, None))
        try:
            written = json.loads(line)
            same = row is not None and {**row, keys.score: written[keys.score]} == written
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise RewardError(f"{target}:{number} is not row {number} of {source}: remove {target}, or name another")
        done += 1
        if (value := _number(written[keys.score])) is not None:
            numbers.append(value)
    return done, numbers


def _number(value: Score) -> float | None:
    """The number of a score; of a mapping its `score` or `weighted`."""
    if isinstance(value, dict):
        value = value.get("score", value.get("weighted"))  # type: ignore[assignment]
    return float(value) if isinstance(value, int | float) else None


def _request(row: dict[str, Any], name: str, keys: Keys, directory: Path) -> RewardRequest:
    image = row.get(keys.image)
    if image is not None:
        image = [_open_image(entry, directory, name) for entry in (image if isinstance(image, list) else [image])]
        image = image[0] if len(image) == 1 else image
    prompt = row.get(keys.prompt)
    return RewardRequest(
        response=row.get(keys.response) or "",
        label=row.get(keys.label),
        prompt=prompt if prompt is None or isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        metadata=row.get(keys.metadata),
        image=image,
        sample_id=name,
        tokens=row.get(keys.tokens),
    )


def _open_image(path: Any, directory: Path, name: str) -> Any:
    from PIL import Image

    try:
        with Image.open(directory / path) as image:
            return image.convert("RGB")
    except (OSError, TypeError, Image.DecompressionBombError) as error:
        raise RewardError(f"{name}: image {path!r:.200} cannot be read: {error}") from error


def _batches(rows: Iterator[tuple[int, dict[str, Any]]], size: int) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    batch: list[tuple[int, dict[str, Any]]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class _progress:
    """A bar on standard error, or nothing; `with` gives the function that moves it on."""

    def __init__(self, total: int, done: int, show: bool) -> None:
        self._total, self._done, self._show = total, done, show
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not self._show:
            return lambda count: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("scoring", total=self._total, completed=self._done)
        return lambda count: self._bar.advance(task, count)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
