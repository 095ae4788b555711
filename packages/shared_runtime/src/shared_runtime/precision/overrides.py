"""Dtypes of single parameters: ordered glob patterns over names, and the modules that compute in a dtype of their own.

FSDP2 casts the parameters of a wrapped module together. A module whose own parameters are overridden alike is wrapped
by itself, which is all that it takes; overrides that would split a module are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from shared_runtime.precision.policy import torch_dtype

Patterns = Sequence[tuple[str, str]]


class DtypeOverrideError(ValueError):
    """Patterns that can't be applied; the message names them."""


def parse_patterns(words: Iterable[str]) -> list[tuple[str, str]]:
    """`["*.norm_q.*=fp32"]` as pairs of pattern and dtype.

    Raises:
        DtypeOverrideError: For a word without `=`, or an unknown dtype.
    """
    pairs = []
    for word in words:
        pattern, separator, dtype = word.rpartition("=")
        if not separator or dtype not in ("fp32", "bf16", "fp16"):
            raise DtypeOverrideError(f"--param-dtype-patterns {word!r} must be a pattern, =, and fp32, bf16 or fp16")
        pairs.append((pattern, dtype))
    return pairs


def param_dtypes(names: Iterable[str], patterns: Patterns, default: torch.dtype) -> dict[str, torch.dtype]:
    """The parameters whose dtype is not the default one, by name.

    Args:
        names: Of all parameters.
        patterns: Glob pattern and dtype; a later one overrides an earlier one.
        default: Dtype of what no pattern matches.

    Raises:
        DtypeOverrideError: If a pattern matches nothing; all of those are listed.
    """
    names, chosen, idle = list(names), {}, []
    for pattern, dtype in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            idle.append(pattern)
        chosen.update(dict.fromkeys(matched, torch_dtype(dtype)))
    if idle:
        raise DtypeOverrideError(
            f"--param-dtype-patterns {' '.join(idle)}: no parameter has a name like that; names are such as "
            f"{', '.join(names[:3])}"
        )
    return {name: dtype for name, dtype in chosen.items() if dtype != default}


def overridden_modules(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[nn.Module, torch.dtype]:
    """The modules that hold the overridden parameters.

    Args:
        module: The whole model.
        dtypes: From :func:`param_dtypes`.

    Raises:
        DtypeOverrideError: If a module holds parameters of several dtypes, or has children with parameters.
    """
    found: dict[nn.Module, torch.dtype] = {}
    for owner in sorted({name.rpartition(".")[0] for name in dtypes}):
        part = module.get_submodule(owner)
        wanted = {dtypes.get(f"{owner}.{name}".lstrip(".")) for name, _ in part.named_parameters()}
        dtype = wanted.pop()
        if dtype is None or wanted:
            raise DtypeOverrideError(
                f"--param-dtype-patterns: the parameters of {owner or 'the model'} are cast together, so a pattern has "
                f"to match all of them: {', '.join(name for name, _ in part.named_parameters())}"
            )
        found[part] = dtype
    return found


def cast_parameters(module: nn.Module, patterns: Patterns, default: torch.dtype) -> None:
    """Cast every floating-point parameter in place, to its own dtype or the default one. Buffers stay as they are.

    Raises:
        DtypeOverrideError: If a pattern matches nothing.
    """
    named = dict(module.named_parameters())
    dtypes = param_dtypes(named, patterns, default)
    for name, parameter in named.items():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtypes.get(name, default))
