"""Prompt sets: rows of a file, checked, as prompt, label and metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from shared_runtime.data.files import DataError, Row, nearest, raise_problems, read_rows

DEFAULT_METADATA_KEY = "metadata"
Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt set.

    Attributes:
        prompt: The text, or a list of chat messages.
        label: What the reward compares with; `None` where the row has none; 0 is a label.
        metadata: The row's own data.
        line: Line of a JSONL file or row number of a parquet file, from 1.
    """

    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int = 0


class PromptDataset(Sequence[PromptRow]):
    """The prompts of a file, in its order."""

    def __init__(self, rows: Sequence[PromptRow], path: Path | str = "<memory>") -> None:
        """Wrap rows made in memory; `load` reads a file."""
        if not rows:
            raise DataError(f"{path}: has no prompts")
        self.rows = list(rows)
        self.path = Path(path)

    @classmethod
    def load(
        cls,
        spec: str | Path,
        *,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str | None = DEFAULT_METADATA_KEY,
        flag: str = "",
    ) -> PromptDataset:
        """Read a prompt set.

        Args:
            spec: Path of a JSONL or parquet file, with an optional slice: `train.jsonl@[0:1000]`.
            input_key: Where a row has its prompt: a string, or a list of chat messages.
            label_key: Where it has its label; `None` for prompts without one.
            metadata_key: Where it has its metadata, an object. No row needs to have the default key.
            flag: The flag that named the file, for messages.

        Raises:
            DataError: Everything that is wrong with the file, each with its line.
        """
        path, numbered = read_rows(str(spec), flag=flag)
        _check_keys(path, numbered, input_key, label_key, metadata_key)
        problems: list[str] = []
        rows: list[PromptRow] = []
        for line, row in numbered:
            problem = _prompt_problem(row, input_key)
            metadata = row.get(metadata_key) if metadata_key else None
            if problem is None and not isinstance(metadata, dict | None):
                problem = f"{metadata_key!r} is {type(metadata).__name__}, not an object"
            if problem is not None:
                problems.append(f"{path}:{line}: {problem}")
                continue
            rows.append(PromptRow(row[input_key], row.get(label_key) if label_key else None, metadata or {}, line))
        raise_problems(problems)
        return cls(rows, path)

    def where(self, position: int) -> str:
        """`file:line` of a row, for messages."""
        return f"{self.path}:{self.rows[position].line or position + 1}"

    @overload
    def __getitem__(self, position: int) -> PromptRow: ...
    @overload
    def __getitem__(self, position: slice) -> list[PromptRow]: ...
    def __getitem__(self, position: int | slice) -> PromptRow | list[PromptRow]:
        return self.rows[position]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self.rows)


def _check_keys(
    path: Path, rows: list[tuple[int, Row]], input_key: str, label_key: str | None, metadata_key: str | None
) -> None:
    """A key that no row has is one problem, not one a row."""
    keys = {key for _, row in rows for key in row}
    asked = [("--input-key", input_key), ("--label-key", label_key)]
    if metadata_key != DEFAULT_METADATA_KEY:
        asked.append(("--metadata-key", metadata_key))
    raise_problems(
        [
            f"{path}: no row has the key {key!r} ({flag}); {nearest(key, sorted(map(str, keys)))}"
            for flag, key in asked
            if key is not None and key not in keys
        ]
    )


def _prompt_problem(row: Row, key: str) -> str | None:
    """What is wrong with a row's prompt, or `None`."""
    if key not in row:
        return f"has no {key!r} (--input-key); {nearest(key, sorted(map(str, row)))}"
    prompt = row[key]
    if isinstance(prompt, str):
        return None if prompt.strip() else f"empty prompt in {key!r}"
    if not isinstance(prompt, list):
        return f"the prompt in {key!r} is {type(prompt).__name__}, not a string or a list of chat messages"
    if not prompt:
        return f"empty prompt in {key!r}: a list without messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {number} in {key!r} is not an object with 'role' and 'content'"
    if not any(message["content"] for message in prompt):
        return f"empty prompt in {key!r}: no message has content"
    return None
