"""Which dtype holds the weights, which one computes, which one reduces gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def torch_dtype(name: str) -> torch.dtype:
    """`bf16`, `fp16`, `fp32`, `fp64`, or torch's own names such as `bfloat16`.

    Raises:
        ValueError: For any other name.
    """
    if name in DTYPES:
        return DTYPES[name]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Mixed precision of a trainer.

    Attributes:
        master: Dtype of the sharded weights and the optimizer state.
        compute: Dtype of forward and backward.
        reduce: Dtype in which gradients are summed over ranks.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, train_dtype: str, *, keep_fp32_master: bool = True) -> PrecisionPolicy:
        """From the flags `--train-dtype` and `--keep-fp32-master`.

        Weights and gradient sums are fp32 at least; without the master copy the weights take the compute dtype.

        Raises:
            ValueError: For fp16, whose gradients would need loss scaling, and for dtypes that aren't floating point.
        """
        compute = torch_dtype(train_dtype)
        if not compute.is_floating_point:
            raise ValueError(f"--train-dtype must be a floating-point dtype, not {train_dtype}")
        if compute == torch.float16:
            raise ValueError("training in fp16 needs loss scaling, which this trainer does not have; use bf16")
        wide = torch.promote_types(compute, torch.float32)
        return cls(master=wide if keep_fp32_master else compute, compute=compute, reduce=wide)
