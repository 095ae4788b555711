"""The few torch operators of `sgl_kernel` that CPU models call without looking whether they are there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def register_cpu_ops() -> None:
    """Define the operators for CPU tensors.

    SGLang takes a build for Intel AMX where others exist (`convert_weight_packed`, `shm_group_initialize`): these must
    not be defined.
    """
    arguments = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps"
    _LIBRARY.define(f"fused_norm_scale_shift_cpu(Tensor x, {arguments}) -> Tensor")
    _LIBRARY.impl("fused_norm_scale_shift_cpu", norm_scale_shift, "CPU")
    _LIBRARY.define(
        "fused_scale_residual_norm_scale_shift_cpu"
        f"(Tensor residual, Tensor x, Tensor? gate, {arguments}) -> (Tensor, Tensor)"
    )
    _LIBRARY.impl("fused_scale_residual_norm_scale_shift_cpu", residual_norm_scale_shift, "CPU")


def norm_scale_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, norm_type: str, eps: float
) -> Tensor:
    """norm(x) · (1 + scale) + shift, computed in fp32 and returned in the dtype of `x`.

    Args:
        x: (B, S, D).
        weight: (D,), or none.
        bias: (D,), or none.
        scale: Like `x`, or broadcasts with it.
        shift: Likewise.
        norm_type: `layer` or `rms`.
        eps: Added to the variance.

    Raises:
        ValueError: For another norm.
    """
    weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    if norm_type == "layer":
        normed = F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    elif norm_type == "rms":
        normed = F.rms_norm(x.float(), x.shape[-1:], weight, eps)
    else:
        raise ValueError(f"norm_type must be layer or rms, got {norm_type!r}")
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


def residual_norm_scale_shift(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    norm_type: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """:func:`norm_scale_shift` of residual + gate · x (no gate counts as 1), and that sum."""
    update = x.float() if gate is None else x.float() * gate.float()
    total = (residual.float() + update).to(x.dtype)
    return norm_scale_shift(total, weight, bias, scale, shift, norm_type, eps), total
