"""What an FSDP trainer of either domain can be told: plain values under the names of the flags. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class FsdpSettings:
    """Model, layout, memory and optimizer of one trainer, the same on every rank."""

    hf_checkpoint: Path
    """Directory of the model to train."""
    ref_load: Path | None = None
    """Directory of the frozen reference. Unset: `hf_checkpoint`."""

    # Layout and memory
    dp_replicate_size: int = 1
    """Replicas of the sharded model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    fsdp_cpu_backend: str = "gloo"
    """Process-group backend for CPU tensors."""
    device: str | None = None
    """Unset: the GPU, where there is one."""
    seed: int = 1234
    """Seed of the trainer."""
    deterministic_mode: bool = False
    """Only deterministic kernels."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a gradient that is not finite."""

    # Optimizer
    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW or plain SGD."""
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Where a decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_iters: int | None = None
    """Optimizer step at which the decay ends."""
    weight_decay: float = 0.1
    """Decoupled; biases and norms are left out."""
    adam_beta1: float = 0.9
    """First moment's decay."""
    adam_beta2: float = 0.98
    """Second moment's decay."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""

    def check(self) -> None:
        """Refuse combinations that can't work.

        Raises:
            ValueError: With the names of what doesn't fit.
        """
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            raise ValueError(f"lr_decay_style {self.lr_decay_style} needs lr_decay_iters")
