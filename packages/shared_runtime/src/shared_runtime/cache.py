"""Where recipes keep what they make: built once, complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """`$TANDEM_CACHE`, or `tandem` in the user's cache directory."""
    root = os.environ.get("TANDEM_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem"


def built_once(directory: Path, build: Callable[[Path], None], *, rebuild: bool = False) -> Path:
    """`directory`, filled by `build` unless it exists already.

    `build` gets an empty staging directory that is renamed when it returns, so an interrupted build leaves nothing
    behind that could be taken for a whole one.

    Args:
        directory: Where the result lives.
        build: Fills the directory it is given.
        rebuild: Build anew even if it exists.
    """
    if directory.is_dir() and not rebuild:
        return directory
    staging = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        build(staging)
        if directory.is_dir():
            shutil.rmtree(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory
