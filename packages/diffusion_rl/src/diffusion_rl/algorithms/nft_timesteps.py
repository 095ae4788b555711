"""Which noise levels DiffusionNFT trains a sample at: hooks for `--diffusion-nft-timestep-strategy-path`."""

from __future__ import annotations

from typing import Any

import torch


def random_subset(num_steps: int, num_dropped: int, generator: torch.Generator) -> list[int]:
    """`num_steps - num_dropped` different steps out of 0..num_steps-1, in random order.

    Raises:
        ValueError: If nothing would be left, or `num_dropped` is negative.
    """
    kept = _num_kept(num_steps, num_dropped)
    return torch.randperm(num_steps, generator=generator)[:kept].tolist()


def without_final(num_steps: int, num_dropped: int) -> list[int]:
    """Steps 0..num_steps-num_dropped-1, noisiest first.

    Raises:
        ValueError: If nothing would be left, or `num_dropped` is negative.
    """
    return list(range(_num_kept(num_steps, num_dropped)))


def drop_random_steps(args: Any, num_steps: int, generator: torch.Generator) -> list[int]:
    """The default hook: drop `--diffusion-nft-num-dropped-timesteps` random steps, random order."""
    return random_subset(num_steps, args.diffusion_nft_num_dropped_timesteps, generator)


def drop_final_steps(args: Any, num_steps: int, generator: torch.Generator) -> list[int]:
    """Drop the `--diffusion-nft-num-dropped-timesteps` steps of lowest noise, schedule order."""
    return without_final(num_steps, args.diffusion_nft_num_dropped_timesteps)


NFT_STRATEGIES = {hook.__name__: hook for hook in (drop_random_steps, drop_final_steps)}
"""Names that `--diffusion-nft-timestep-strategy-path` takes besides dotted paths."""


def check_steps(steps: list[int], num_steps: int, path: str) -> list[int]:
    """What a strategy returned, if it can be trained on.

    Raises:
        ValueError: For an empty list, a repeated step or one outside 0..num_steps-1; the message names the hook.
    """
    valid = all(isinstance(step, int) and 0 <= step < num_steps for step in steps)
    if not steps or not valid or len(set(steps)) != len(steps):
        raise ValueError(
            f"--diffusion-nft-timestep-strategy-path {path} returned {steps}: it must return different step indices "
            f"from 0 to {num_steps - 1} (--diffusion-num-steps {num_steps})"
        )
    return steps


def _num_kept(num_steps: int, num_dropped: int) -> int:
    if not 0 <= num_dropped < num_steps:
        raise ValueError(
            f"--diffusion-nft-num-dropped-timesteps {num_dropped} must lie in [0, {num_steps - 1}]: "
            f"there are --diffusion-num-steps {num_steps}"
        )
    return num_steps - num_dropped
