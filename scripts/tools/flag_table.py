"""The table of all flags of a program, from the dataclasses that define them.

uv run scripts/tools/flag_table.py > docs/flags.md
uv run scripts/tools/flag_table.py diffusion-rl > docs/diffusion_flags.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import diffusion_rl.config
import llm_rl.config

PROGRAMS: dict[str, type[Any]] = {
    "llm-rl": llm_rl.config.TrainConfig,
    "diffusion-rl": diffusion_rl.config.TrainConfig,
}
HEAD = """# Flags of `{program}`

Every flag of `{program} train`, by the group under which a [config file](configuration.md) has it. Made by
`scripts/tools/flag_table.py`.
"""


def render(program: str) -> str:
    """The whole page.

    Args:
        program: A key of `PROGRAMS`; its configuration is a dataclass whose fields are dataclasses, one a group.
    """
    parts, config_type = [HEAD.format(program=program)], PROGRAMS[program]
    for group, kind in get_type_hints(config_type).items():
        summary = (inspect.getdoc(kind) or "").splitlines()[0]
        parts.append(f"## `{group}`\n\n{summary}\n\n| flag | value | default | |\n| - | - | - | - |\n{_rows(kind)}\n")
    return "\n".join(parts)


def _rows(group: type[Any]) -> str:
    hints, documentation = get_type_hints(group), field_docstrings(group)
    return "\n".join(
        f"| {_flag(f)} | {_type(hints[f.name])} | {_default(f.default)} | {_escape(documentation[f.name])} |"
        for f in dataclasses.fields(group)
    )


def field_docstrings(group: type[Any]) -> dict[str, str]:
    """The string literal below each field of a dataclass and of those it extends, on one line.

    Raises:
        ValueError: If a field has none; it would have no help text either.
    """
    found: dict[str, str] = {}
    for kind in reversed(group.__mro__[:-1]):
        found |= _own_docstrings(kind)
    missing = [f.name for f in dataclasses.fields(group) if f.name not in found]
    if missing:
        raise ValueError(f"{group.__name__}: no docstring below {', '.join(missing)}")
    return found


def _own_docstrings(kind: type[Any]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _flag(field: dataclasses.Field[Any]) -> str:
    name = field.name.replace("_", "-")
    return f"`--no-{name}`" if field.default is True else f"`--{name}`"


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # A switch that may be unset has no --no- form; it takes a word.
        rest = [argument for argument in arguments if argument is not NoneType]
        return " or ".join("`True`, `False`" if argument is bool else _type(argument) for argument in rest)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"{_type(arguments[0])} …"
    return {bool: "switch", Path: "path", str: "text", int: "integer", float: "number"}[hint]


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(sys.argv[1] if len(sys.argv) > 1 else "llm-rl"), end="")
