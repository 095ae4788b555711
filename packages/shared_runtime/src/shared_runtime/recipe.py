"""What the scripts have in common: a preset is picked, and the remaining flags go to the trainer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class Preset(Generic[C]):
    """A ready-made run.

    Attributes:
        name: Name of the recipe's run directory.
        config: Its settings.
        prepare: Makes model and data in the cache; the argument asks to make them anew.
    """

    name: str
    config: C
    prepare: Callable[[bool], None]


def run_recipe(
    presets: Mapping[str, Callable[[], Preset[Any]]],
    train_from_command_line: Callable[..., None],
    description: str | None,
    *,
    flag: str = "--preset",
) -> None:
    """Run a script: `flag` picks the preset, `--no-cache` makes its model and data anew, the rest is the trainer's.

    Args:
        presets: By name; `tiny` is the default.
        train_from_command_line: The domain's.
        description: The script's docstring, for its help.
        flag: What picks the preset.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="preset", choices=sorted(presets), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = presets[ours.preset]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=description,
        prepare=lambda: preset.prepare(ours.no_cache),
    )
