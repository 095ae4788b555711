"""Typed config to and from flat kebab-case flags: `--rollout-batch-size 32`, `--config FILE`, `--print-config`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import tyro

from shared_runtime.config.files import dump_config, load_config
from shared_runtime.config.problems import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Invocation(Generic[T]):
    """What a command line asked for."""

    config: T
    dry_run: bool


def parse(
    default: T,
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    check: Callable[[T], T] | None = None,
) -> Invocation[T]:
    """Read flags over `default`; `--config FILE` replaces the default first, so flags win over the file.

    `--print-config` prints the checked configuration as YAML and exits. A configuration that can't work prints
    all its problems and exits with status 2.

    Args:
        default: A frozen dataclass of groups; the flags are its leaf fields.
        args: Command-line words; `None` takes the process's own.
        prog: Program name in help.
        description: First lines of the help.
        check: Validates and resolves; raises `ConfigError`.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        config_file, words = _take_value(words, "--config")
        print_config, words = _take_switch(words, "--print-config")
        dry_run, words = _take_switch(words, "--dry-run")
        if config_file is not None:
            default = load_config(default, Path(config_file))
        config = tyro.cli(
            type(default),
            default=default,
            args=words,
            prog=prog,
            description=_describe(description),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
        config = check(config) if check is not None else config
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if print_config:
        print(dump_config(config), end="")
        raise SystemExit(0)
    return Invocation(config, dry_run)


def _describe(description: str | None) -> str:
    return (
        (description or "").strip()
        + "\n\nAlso: --config FILE (settings from a YAML file; flags win), --print-config (print the resolved settings "
        "and exit), --dry-run (check everything, start nothing)."
    ).strip()


def _take_switch(words: list[str], name: str) -> tuple[bool, list[str]]:
    return name in words, [w for w in words if w != name]


def _take_value(words: list[str], name: str) -> tuple[str | None, list[str]]:
    """Remove `--name VALUE` or `--name=VALUE`; the last one wins."""
    value, rest, i = None, [], 0
    while i < len(words):
        if words[i] == name:
            if i + 1 == len(words):
                raise ConfigError([f"{name} needs a file"])
            value, i = words[i + 1], i + 2
        elif words[i].startswith(name + "="):
            value, i = words[i].split("=", 1)[1], i + 1
        else:
            rest.append(words[i])
            i += 1
    return value, rest


def flag_names(config_type: type[Any]) -> list[str]:
    """All flags of a config class, as the help shows them (for the test that freezes the list)."""
    import dataclasses
    from typing import get_type_hints

    names: list[str] = []
    for name, hint in get_type_hints(config_type).items():
        if dataclasses.is_dataclass(hint):
            names.extend(flag_names(hint))  # type: ignore[arg-type]
        else:
            names.append("--" + name.replace("_", "-"))
    return names
