"""`random`: a fair coin, for smoke tests and spurious-reward ablations."""

from __future__ import annotations

import random


def grade() -> float:
    """0.0 or 1.0 with equal probability, from Python's global generator (`random.seed` makes it repeatable).

    Training on it is an ablation of its own: see Shao et al. 2025, https://arxiv.org/abs/2506.10947.
    """
    return float(random.getrandbits(1))
