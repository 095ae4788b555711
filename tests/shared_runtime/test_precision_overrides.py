"""Ordered patterns over parameter names, and what can't be cast on its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_runtime.precision.overrides import (
    DtypeOverrideError,
    cast_parameters,
    overridden_modules,
    param_dtypes,
    parse_patterns,
)

NAMES = ["in.weight", "blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.norm.bias"]


def test_later_patterns_carve_out_of_earlier_ones() -> None:
    patterns = parse_patterns(["*.norm.*=fp32", "blocks.1.*=bf16"])
    found = param_dtypes(NAMES, patterns, torch.bfloat16)
    assert found == dict.fromkeys(NAMES[1:3], torch.float32)  # what equals the default needs nothing
    assert param_dtypes(NAMES, list(reversed(patterns)), torch.bfloat16) == dict.fromkeys(NAMES[1:], torch.float32)


def test_patterns_that_match_nothing_are_errors_and_listed() -> None:
    with pytest.raises(DtypeOverrideError, match=r"\*\.scale no\.\*: no parameter has a name like that"):
        param_dtypes(NAMES, [("*.scale", "fp32"), ("in.*", "fp32"), ("no.*", "bf16")], torch.bfloat16)


@pytest.mark.parametrize("word", ["*.norm.*", "*.norm.*=int8", "=fp64"])
def test_words_that_are_no_pattern(word: str) -> None:
    with pytest.raises(DtypeOverrideError, match="must be a pattern"):
        parse_patterns([word])


def test_modules_are_cast_whole_or_not_at_all() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)))
    module[1].register_parameter("scale", nn.Parameter(torch.ones(2)))
    both = {"0.weight": torch.float32, "0.bias": torch.float32}
    assert overridden_modules(module, both) == {module[0]: torch.float32}
    with pytest.raises(DtypeOverrideError, match=r"parameters of 0 are cast together.*weight, bias"):
        overridden_modules(module, {"0.weight": torch.float32})
    with pytest.raises(DtypeOverrideError, match="cast together"):
        overridden_modules(module, both | {"0.bias": torch.float16})
    with pytest.raises(DtypeOverrideError, match=r"of 1 are cast together.*scale, 0\.weight, 0\.bias"):
        overridden_modules(module, {"1.scale": torch.float32})


def test_casting_leaves_buffers_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    cast_parameters(module, [("1.*", "fp16")], torch.bfloat16)
    assert [p.dtype for p in module.parameters()] == [torch.bfloat16] * 2 + [torch.float16] * 2
    assert module[1].running_mean.dtype == torch.float32
