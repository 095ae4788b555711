"""Typed configuration to and from YAML: nested by group, unknown keys refused with the nearest name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import yaml

from shared_runtime.config.convert import convert
from shared_runtime.config.problems import ConfigError, Problems, nearest

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A (nested) dataclass as plain data that YAML can hold."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def from_dict(default: T, data: Mapping[str, Any], *, source: str = "config") -> T:
    """`default` with the values of `data` put in; the reverse of `to_dict`, and any part of it.

    Raises:
        ConfigError: For unknown keys (with the nearest known one) and values of the wrong type, all at once.
    """
    problems = Problems()
    result = _merge(default, data, source, problems, root=default)
    problems.raise_if_any()
    return result


def _merge(default: Any, data: Mapping[str, Any], where: str, problems: Problems, *, root: Any) -> Any:
    hints = get_type_hints(type(default))
    names = {f.name for f in dataclasses.fields(default)}
    changes: dict[str, Any] = {}
    for raw_key, value in data.items():
        key = str(raw_key).replace("-", "_")
        if key not in names:
            problems.add(f"{where}: unknown key {raw_key!r}{_hint(root, default, key)}")
            continue
        current = getattr(default, key)
        if dataclasses.is_dataclass(current):
            if isinstance(value, Mapping):
                changes[key] = _merge(current, value, f"{where}: {key}", problems, root=root)
            else:
                problems.add(f"{where}: {key} is a group of settings, got {value!r}")
            continue
        try:
            changes[key] = convert(value, hints[key])
        except (TypeError, ValueError) as error:
            problems.add(f"{where}: {key}: {error}")
    return dataclasses.replace(default, **changes)


def _hint(root: Any, default: Any, key: str) -> str:
    """The nearest name; a key that belongs to another group is named with its group."""
    for f in dataclasses.fields(root):
        group = getattr(root, f.name)
        if dataclasses.is_dataclass(group) and key in {g.name for g in dataclasses.fields(group)}:
            return f"; it belongs under {f.name!r}"
    return nearest(key, [f.name for f in dataclasses.fields(default)])


def load_config(default: T, path: Path) -> T:
    """Read a YAML file over `default`.

    Raises:
        ConfigError: If the file is missing, is no YAML mapping, or holds unknown keys or wrong types.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError([f"--config {path}: no such file"]) from None
    except OSError as error:
        raise ConfigError([f"--config {path} can't be read: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {path} is not YAML: {error}"]) from None
    if not isinstance(data, Mapping):
        raise ConfigError([f"--config {path} must hold groups of settings, got {type(data).__name__}"])
    return from_dict(default, data, source=str(path))


def dump_config(config: Any) -> str:
    """The configuration as YAML text."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def save_config(config: Any, path: Path) -> None:
    """Write the configuration as YAML that `load_config` reads back."""
    path.write_text(dump_config(config))


def flat_args(config: Any) -> SimpleNamespace:
    """All settings in one flat namespace, as hooks receive them: `args.rollout_batch_size`."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            values.update(vars(flat_args(value)))
        else:
            values[f.name] = value
    return SimpleNamespace(**values)
