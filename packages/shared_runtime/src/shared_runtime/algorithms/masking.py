"""Masks select, they never multiply: `0 * inf` is NaN, and so is its gradient."""

from __future__ import annotations

from torch import Tensor


def select(mask: Tensor, values: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask` is set, `fill` elsewhere; neither value nor gradient of the rest gets through.

    Apply it to what goes *into* `exp`, `log` or a division, not to what comes out: the derivative of `exp(inf)`
    is inf, and inf times the zero gradient of an unselected entry is NaN.

    Args:
        mask: Any dtype, non-zero means selected, broadcast against `values`.
        values: Any shape.
        fill: Value of unselected entries.
    """
    return values.masked_fill(mask == 0, fill)
