"""Configurations as plain data: what may be written, and how two of them differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

SECRETS = frozenset({"wandb_key", "wandb-key", "api_key", "hf_token"})
_ABSENT = object()


def drop_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keys that must not reach a file."""
    return {
        key: drop_secrets(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in SECRETS
    }


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples, paths and enums as what YAML reads back as the same.

    Raises:
        TypeError: If there is no such form.
    """
    if value is None or isinstance(value, bool) or type(value) in (int, float, str):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(to_plain(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"a configuration can't hold a {type(value).__name__}: {value!r}")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ()) -> list[str]:
    """One readable line for each key whose value differs, sorted by key.

    Args:
        earlier: Plain configuration of the run that exists.
        now: Plain configuration of the run that starts.
        ignore: Dotted keys or prefixes that don't count.
    """
    old, new = flatten(earlier), flatten(now)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in ignore):
            continue
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if before != after or isinstance(before, bool) != isinstance(after, bool):
            lines.append(f"{key}: {_show(before)} there, {_show(after)} now")
    return lines


def _show(value: Any) -> str:
    return "nothing" if value is _ABSENT else repr(value)
