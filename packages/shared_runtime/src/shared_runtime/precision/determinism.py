"""Seeds, and kernels that give the same bits every time."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_deterministic_kernels(enabled: bool = True) -> None:
    """Make torch choose deterministic kernels, and raise where an operation has none.

    cuBLAS reads its workspace setting when its first handle is made, so call this before any CUDA work.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = not enabled and torch.backends.cudnn.benchmark
