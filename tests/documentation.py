"""Reads the examples in the documentation, so that tests run what users copy."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [text for name, text in _BLOCK.findall(page.read_text()) if name == language]


def write_modules(page: Path, directory: Path) -> None:
    """Write Python blocks as the files that their first lines (`# path/file.py`) name; blocks of one file add up."""
    for text in blocks(page, "python"):
        first, _, body = text.partition("\n")
        path = directory / first.removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(body)


def commands(page: Path) -> list[list[str]]:
    """The words of every command in the shell blocks, comments left out, continued lines joined."""
    lines = [line for text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
