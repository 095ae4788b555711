"""Which denoising steps of a request are stochastic and trained: hooks for `--diffusion-step-strategy-path`.

A hook returns `(sde_step_indices, return_step_indices)`. The first names steps (0..T-1); `None` means that every step
follows `--diffusion-sde-type`. The second names latents (0 the noise, T the clean result); `None` returns all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

Steps = tuple[list[int] | None, list[int] | None]


def window_steps(num_steps: int, num_sde_steps: int, window_range: tuple[int, int] | None, seed: int) -> list[int]:
    """A window of `num_sde_steps` neighbouring steps that lies in `window_range`, at a place that `seed` chooses.

    Args:
        num_steps: Steps of the schedule.
        num_sde_steps: Steps in the window.
        window_range: `[lo, hi)`, default the whole schedule.
        seed: Same seed, same window.

    Raises:
        ValueError: If the range leaves the schedule or the window doesn't fit in it; the message has the numbers.

    Papers: MixGRPO, arXiv:2507.21802; TempFlow-GRPO, arXiv:2508.04324.
    """
    low, high = window_range or (0, num_steps)
    if not 0 <= low < high <= num_steps:
        raise ValueError(
            f"--diffusion-sde-window-range {low},{high} must satisfy 0 <= lo < hi <= --diffusion-num-steps {num_steps}"
        )
    if not 1 <= num_sde_steps <= high - low:
        raise ValueError(
            f"--diffusion-num-sde-steps {num_sde_steps} must be between 1 and the {high - low} steps of "
            f"--diffusion-sde-window-range {low},{high}"
        )
    start = random.Random(f"sde_window:{seed}").randint(low, high - num_sde_steps)
    return list(range(start, start + num_sde_steps))


def block_steps(
    num_steps: int, num_sde_steps: int, candidates: Sequence[int], *, group_index: int, groups_a_block: int, seed: int
) -> list[int]:
    """`num_sde_steps` of `candidates`, in schedule order, the same for each block of consecutive prompt groups.

    Args:
        num_steps: Steps of the schedule.
        num_sde_steps: How many to choose.
        candidates: Steps to choose from.
        group_index: The group's global id.
        groups_a_block: Groups that share the choice (`--rollout-batch-size`: one rollout).
        seed: The run's seed.

    Raises:
        ValueError: If candidates are missing, repeated or outside the schedule, or fewer than are to be chosen.
    """
    listed = ",".join(map(str, candidates))
    if not candidates or len(set(candidates)) != len(candidates) or not all(0 <= c < num_steps for c in candidates):
        raise ValueError(
            f"--diffusion-sde-candidate-steps {listed or '(unset)'} must name different steps from 0 to {num_steps - 1}"
        )
    if not 1 <= num_sde_steps <= len(candidates):
        raise ValueError(
            f"--diffusion-num-sde-steps {num_sde_steps} must be between 1 and the {len(candidates)} steps of "
            f"--diffusion-sde-candidate-steps {listed}"
        )
    rng = random.Random(f"block_steps:{seed}:{group_index // groups_a_block}")
    return sorted(rng.sample(sorted(candidates), num_sde_steps))


def touched_latents(steps: Iterable[int]) -> list[int]:
    """The latents that the transitions of `steps` start from or end at."""
    return sorted({latent for step in steps for latent in (step, step + 1)})


def sde_window(args: Any, sample: Any, num_steps: int, seed: int) -> Steps:
    """Hook: a random window (`--diffusion-num-sde-steps`, `--diffusion-sde-window-range`)."""
    steps = window_steps(num_steps, args.diffusion_num_sde_steps, args.diffusion_sde_window_range, seed)
    return steps, touched_latents(steps)


def epoch_global_random_choice(args: Any, sample: Any, num_steps: int, seed: int) -> Steps:
    """Hook: a subset of `--diffusion-sde-candidate-steps`, one a block of `--rollout-batch-size` groups."""
    steps = block_steps(
        num_steps,
        args.diffusion_num_sde_steps,
        args.diffusion_sde_candidate_steps or (),
        group_index=sample.group_index,
        groups_a_block=args.rollout_batch_size,
        seed=args.rollout_seed,
    )
    return steps, touched_latents(steps)


def ode_and_return_last(args: Any, sample: Any, num_steps: int, seed: int) -> Steps:
    """Hook for DiffusionNFT: every step follows `--diffusion-sde-type`, only the clean latents come back."""
    return None, [num_steps]


STEP_STRATEGIES = {hook.__name__: hook for hook in (sde_window, epoch_global_random_choice, ode_and_return_last)}
"""Names that `--diffusion-step-strategy-path` takes besides dotted paths."""


def check_strategy(steps: Steps, num_steps: int, path: str) -> Steps:
    """What a strategy returned, sorted, if the schedule has those steps.

    Raises:
        ValueError: For steps outside the schedule, repeated ones, or a transition whose latents would not come back.
    """
    sde, returned = steps
    for name, indices, last in (("sde_step_indices", sde, num_steps - 1), ("return_step_indices", returned, num_steps)):
        if indices is None:
            continue
        if not all(isinstance(i, int) and 0 <= i <= last for i in indices) or len(set(indices)) != len(indices):
            raise ValueError(
                f"--diffusion-step-strategy-path {path} returned {name} {list(indices)}: "
                f"they must be different and lie in 0..{last} (--diffusion-num-steps {num_steps})"
            )
    if sde is not None and returned is not None:
        missing = sorted(set(touched_latents(sde)) - set(returned))
        if missing:
            raise ValueError(
                f"--diffusion-step-strategy-path {path} returned sde_step_indices {sorted(sde)} but not the latents "
                f"{missing} that they start from or end at"
            )
    return (None if sde is None else sorted(sde)), (None if returned is None else sorted(returned))
