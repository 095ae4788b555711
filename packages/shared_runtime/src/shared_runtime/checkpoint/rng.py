"""The state of a rank's random generators, so that dropout and the like go on where they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RNG = "rng"


def save_rng(directory: Path, rank: int) -> None:
    """Write the generators of Python, numpy and torch (with its current device) of this rank."""
    (directory / RNG).mkdir(exist_ok=True)
    torch.save(_state(), _path(directory, rank))


def load_rng(directory: Path, rank: int) -> bool:
    """Set the generators to what `save_rng` wrote.

    Returns:
        Whether this rank had been saved: at another number of ranks, or on another device, some have not, and go on
        from their seed.
    """
    path = _path(directory, rank)
    if not path.is_file():
        return False
    state = torch.load(path, weights_only=True)
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    random.setstate((version, tuple(words), None))
    position, has_gauss, gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


def _state() -> dict[str, Tensor]:
    version, words, _ = random.getstate()
    _, keys, *position = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_position": torch.tensor(position, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _path(directory: Path, rank: int) -> Path:
    return directory / RNG / f"rank_{rank:05d}.pt"
