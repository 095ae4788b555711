"""A YAML value to a field's declared type: strict, with numbers such as `1e-6` read as YAML users mean them."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as `hint` declares it.

    Raises:
        ValueError: If it isn't that.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _union(value, get_args(hint))
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError(f"must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, got {value!r}")
        return tuple(convert(v, get_args(hint)[0]) for v in value)
    if hint is bool:
        return _exactly(value, bool, "true or false")
    if hint is int:
        if isinstance(value, bool):
            raise ValueError(f"must be a whole number, got {value!r}")
        return _exactly(value, int, "a whole number")
    if hint is float:
        return _float(value)
    if hint is str:
        return _exactly(value, str, "text")
    if hint is Path:
        return Path(_exactly(value, str, "a path"))
    if hint is NoneType:
        return _exactly(value, NoneType, "null")
    raise TypeError(f"no conversion for {hint}")


def _exactly(value: Any, kind: type, words: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"must be {words}, got {value!r}")
    return value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a number, got {value!r}")
    try:
        return float(value)  # YAML 1.1 reads 1e-6 (no dot) as text
    except ValueError:
        raise ValueError(f"must be a number, got {value!r}") from None


def _union(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and NoneType in options:
        return None
    errors = []
    for option in options:
        if option is not NoneType:
            try:
                return convert(value, option)
            except ValueError as error:
                errors.append(str(error))
    raise ValueError(errors[0])
