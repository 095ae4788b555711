"""From scored samples to training rows: advantages, one row a trained pair, in the order of the tiles."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffusion_rl.algorithms.advantages import diffusion_advantages
from diffusion_rl.algorithms.nft_timesteps import check_steps
from diffusion_rl.sample import Sample
from diffusion_rl.trainers.fsdp.batch import TrainRow
from shared_runtime.rollout.types import name_sample
from shared_runtime.training.plan import StepPlan, plan_rollout

_EVERY_ROW = ("sample_index", "conditions", "trained", "sigma", "timestep", "advantage")
PAIR_ENTRIES = (*_EVERY_ROW, "latents", "next_latents", "next_sigma", "sigma_max", "log_prob")
"""What the policy loss and custom losses read of a row."""
NOISED_ENTRIES = (*_EVERY_ROW, "clean", "seed")
"""What DiffusionNFT reads of one."""


def samples_to_rows(samples: Sequence[Sample], advantages: Sequence[float]) -> list[list[TrainRow]]:
    """The pairs of each sample: one a stochastic step, in schedule order.

    Args:
        samples: With trajectories.
        advantages: One a sample.

    Raises:
        ValueError: For a sample without a trajectory, or without a stochastic step; it is named.
    """
    return [_pairs(sample, float(advantage)) for sample, advantage in zip(samples, advantages, strict=True)]


def _pairs(sample: Sample, advantage: float) -> list[TrainRow]:
    trajectory = sample.trajectory
    if trajectory is None or sample.conditions is None:
        raise ValueError(f"{name_sample(sample)} has no trajectory to train on")
    if not trajectory.sde_steps:
        raise ValueError(
            f"{name_sample(sample)} has no stochastic step, and so no log-prob to train on: Flow-GRPO needs "
            "--diffusion-noise-level above 0 and a step strategy that picks steps"
        )
    rows = []
    for k, step in enumerate(trajectory.sde_steps):
        row = TrainRow(
            sample_index=sample.index,
            conditions=sample.conditions,
            negative_conditions=sample.negative_conditions,
            trained=0.0 if sample.remove_sample else 1.0,
            latents=trajectory.latent(step),
            next_latents=trajectory.latent(step + 1),
            sigma=float(trajectory.sigmas[step]),
            next_sigma=float(trajectory.sigmas[step + 1]),
            sigma_max=float(trajectory.sigmas[1]),
            timestep=float(trajectory.timesteps[step]),
            log_prob=float(trajectory.log_probs[k]),
            advantage=advantage,
        )
        if trajectory.model_outputs is not None:
            row["model_output"] = trajectory.model_outputs[k]
        rows.append(row)
    return rows


def samples_to_pictures(samples: Sequence[Sample], *, seed: int) -> list[list[TrainRow]]:
    """One row a picture, for flow matching: each draws its own noise level and noise.

    Args:
        samples: With trajectories that end in the clean latents.
        seed: What the draws derive from, with the sample's index.

    Raises:
        ValueError: For a sample without latents; it is named.
    """
    rows = []
    for sample in samples:
        if sample.trajectory is None or sample.conditions is None:
            raise ValueError(f"{name_sample(sample)} has no latents to train on")
        row = TrainRow(
            sample_index=sample.index,
            conditions=sample.conditions,
            trained=0.0 if sample.remove_sample else 1.0,
            clean=sample.trajectory.clean,
            seed=_noise_seed(seed, sample.index, 0),
        )
        rows.append([row])
    return rows


def samples_to_noised_rows(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    strategy: Callable[[Any, int, torch.Generator], list[int]],
    args: Any,
    *,
    seed: int,
    strategy_path: str = "",
) -> list[list[TrainRow]]:
    """DiffusionNFT's rows of each sample: its clean latents, to be noised to the sampling noise levels of some steps.

    Args:
        samples: With trajectories that end in the clean latents.
        advantages: One a sample.
        strategy: `(args, num_steps, generator) -> steps`, in training order; the generator is the sample's own.
        args: The run's flat arguments.
        seed: What steps and noise derive from, with the sample's index.
        strategy_path: Its name, for messages.
    """
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        trajectory = sample.trajectory
        if trajectory is None or sample.conditions is None:
            raise ValueError(f"{name_sample(sample)} has no trajectory to train on")
        num_steps = trajectory.num_steps
        generator = torch.Generator().manual_seed(_noise_seed(seed, sample.index, num_steps))
        steps = check_steps(strategy(args, num_steps, generator), num_steps, strategy_path)
        rows.append(
            [
                TrainRow(
                    sample_index=sample.index,
                    conditions=sample.conditions,
                    negative_conditions=sample.negative_conditions,
                    trained=0.0 if sample.remove_sample else 1.0,
                    clean=trajectory.clean,
                    seed=_noise_seed(seed, sample.index, step),
                    sigma=float(trajectory.sigmas[step]),
                    timestep=float(trajectory.timesteps[step]),
                    advantage=float(advantage),
                )
                for step in steps
            ]
        )
    return rows


def _noise_seed(seed: int, index: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rollout_advantages(
    samples: Sequence[Sample],
    *,
    reward_key: str | None = None,
    std_normalization: bool = True,
    globalize_mean: bool = False,
    globalize_std: bool = False,
    unbiased: bool = True,
) -> list[float]:
    """Advantages of a rollout's samples; see :func:`~diffusion_rl.algorithms.advantages.diffusion_advantages`."""
    return diffusion_advantages(
        [sample.scalar_reward(reward_key) for sample in samples],
        [sample.group_index for sample in samples],
        std_normalization=std_normalization,
        globalize_mean=globalize_mean,
        globalize_std=globalize_std,
        unbiased=unbiased,
    ).tolist()


def checked_rows(rows: Any, samples: Sequence[Sample], flag: str, *, noised: bool = False) -> list[list[TrainRow]]:
    """What a user's function made of samples, if it can be trained on.

    Args:
        rows: One list of rows a sample, some of them empty.
        samples: What they were made of.
        flag: The function's flag, for messages.
        noised: Whether they are DiffusionNFT's rows.

    Raises:
        ValueError: If it is something else, or a row lacks an entry; its sample is named.
    """
    if not isinstance(rows, list | tuple) or len(rows) != len(samples):
        found = len(rows) if isinstance(rows, list | tuple) else type(rows).__name__
        raise ValueError(f"{flag} returned {found}, expected a list of rows for each of {len(samples)} samples")
    needed = NOISED_ENTRIES if noised else PAIR_ENTRIES
    for sample, of_sample in zip(samples, rows, strict=True):
        for row in of_sample:
            missing = [name for name in needed if name not in row]
            if missing:
                raise ValueError(f"{flag}: a row of {name_sample(sample)} lacks {', '.join(missing)}")
    if not any(rows):
        raise ValueError(f"{flag}: no row is left of {len(samples)} samples")
    return [list(of_sample) for of_sample in rows if of_sample]


def tiled(pairs: Sequence[Sequence[TrainRow]], tile_samples: int, tile_steps: int) -> list[TrainRow]:
    """All pairs, ordered so that cuts of `tile_samples x tile_steps` are tiles: some samples at some timesteps each.

    Args:
        pairs: Of each sample, in schedule order.
        tile_samples: Samples a tile (`--micro-batch-size-sample`).
        tile_steps: Timesteps a tile (`--micro-batch-size-tstep`).
    """
    ordered: list[TrainRow] = []
    for first in range(0, len(pairs), tile_samples):
        block = pairs[first : first + tile_samples]
        for step in range(0, max(map(len, block)), tile_steps):
            ordered.extend(row for rows in block for row in rows[step : step + tile_steps])
    return ordered


def plan_pairs(
    pairs: Sequence[Sequence[TrainRow]],
    *,
    dp_size: int,
    num_steps: int,
    micro_batch_size: int = 1,
    micro_batch_size_sample: int | None = None,
    micro_batch_size_tstep: int | None = None,
) -> list[list[StepPlan]]:
    """Split the pairs of a rollout over optimizer steps, ranks and micro-batches.

    The trained update does not depend on `dp_size` or on the micro-batches, since the loss of a pair is weighed with
    the number of pairs of the whole step. A rank without rows in a micro-batch gets one with weight 0, since every
    forward pass contains collectives.

    Args:
        pairs: Of each sample; see :func:`samples_to_rows`.
        dp_size: Trainer ranks.
        num_steps: Optimizer steps.
        micro_batch_size: Pairs a forward pass, a flat cut.
        micro_batch_size_sample: With `micro_batch_size_tstep`: a tile instead.
        micro_batch_size_tstep: Timesteps of a tile.
    """
    if micro_batch_size_sample is not None and micro_batch_size_tstep is not None:
        rows = tiled(pairs, micro_batch_size_sample, micro_batch_size_tstep)
        micro_batch_size = micro_batch_size_sample * micro_batch_size_tstep
    else:
        rows = [row for sample in pairs for row in sample]
    plain: list[dict[str, Any]] = list(rows)  # type: ignore[arg-type]
    plans = plan_rollout(
        plain,
        [1] * len(rows),
        [row["sample_index"] for row in rows],
        [int(row["trained"]) for row in rows],
        dp_size=dp_size,
        num_steps=num_steps,
        micro_batch_size=micro_batch_size,
    )
    for rank in plans:
        for plan in rank:
            _fill_empty(plan, rows[0])
    return plans


def _fill_empty(plan: StepPlan, row: TrainRow) -> None:
    if all(plan.micro_batches):
        return
    idle: Any = copy.copy(row)
    idle["trained"] = 0.0
    plan.rows.append(idle)
    plan.sample_num_tokens.append(0)
    plan.micro_batches = [batch or [len(plan.rows) - 1] for batch in plan.micro_batches]
