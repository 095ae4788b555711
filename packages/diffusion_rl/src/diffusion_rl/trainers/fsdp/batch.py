"""What the trainer reads: rows of one (sample, timestep) pair or one picture, and micro-batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from diffusion_rl.algorithms.nft import add_noise
from diffusion_rl.algorithms.sft import logit_normal_sigmas
from diffusion_rl.models.family import ModelFamily
from diffusion_rl.sample import Conditions

if TYPE_CHECKING:
    from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings

# The scheduler's timesteps are its noise levels times this.
TIMESTEPS_A_SIGMA = 1000.0


class TrainRow(TypedDict, total=False):
    """A training row. Arrays are float32 and exactly what the engine computed with.

    Every row has `sample_index`, `conditions` and `trained` (0 leaves it out of the loss); `negative_conditions` are
    needed where training uses guidance.

    A pair has `latents` (...), `next_latents` (...), `sigma`, `next_sigma`, `sigma_max`, `timestep`, `log_prob` under
    the policy that sampled, `advantage`, and with debug tensors `model_output` (...).

    A picture has `clean` (...), its latents, and `seed`, from which noise level and noise are drawn. For DiffusionNFT
    it has `sigma`, `timestep` and `advantage` besides, and only the noise is drawn.
    """

    sample_index: int
    conditions: Conditions
    negative_conditions: Conditions | None
    trained: float
    latents: np.ndarray
    next_latents: np.ndarray
    sigma: float
    next_sigma: float
    sigma_max: float
    timestep: float
    log_prob: float
    advantage: float
    model_output: np.ndarray
    clean: np.ndarray
    seed: int


@dataclass
class PairBatch:
    """B pairs of a policy loss.

    Attributes:
        latents: (B, ...), before the step.
        next_latents: (B, ...), after it.
        sigma: (B,).
        next_sigma: (B,).
        sigma_max: (B,), the second σ of the pair's grid.
        timesteps: (B,), as the schedule has them.
        log_probs: (B,), of the policy that sampled.
        advantages: (B,).
        trained: (B,), 1 or 0.
        model_outputs: (B, ...), the engine's velocity, where every row has it.
        conditions: The transformer's arguments.
        negative_conditions: Those of the negative prompts, where every row has them.
        ref_means: (B, ...), mean of the step under the reference, without one `None`.
    """

    latents: Tensor
    next_latents: Tensor
    sigma: Tensor
    next_sigma: Tensor
    sigma_max: Tensor
    timesteps: Tensor
    log_probs: Tensor
    advantages: Tensor
    trained: Tensor
    model_outputs: Tensor | None
    conditions: dict[str, Tensor]
    negative_conditions: dict[str, Tensor] | None
    ref_means: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sigma)


@dataclass
class PictureBatch:
    """B noised pictures.

    Attributes:
        clean: (B, ...).
        noise: (B, ...).
        noisy: (B, ...), (1-σ)·`clean` + σ·`noise`.
        sigma: (B,).
        timesteps: (B,), as a schedule has them.
        advantages: (B,), of DiffusionNFT; zero otherwise.
        trained: (B,), 1 or 0.
        conditions: The transformer's arguments.
        negative_conditions: Those of the negative prompts, where every row has them.
        old_velocity: (B, ...), of the policy that sampled.
        ref_velocity: (B, ...), of the reference, where there is one.
    """

    clean: Tensor
    noise: Tensor
    noisy: Tensor
    sigma: Tensor
    timesteps: Tensor
    advantages: Tensor
    trained: Tensor
    conditions: dict[str, Tensor]
    negative_conditions: dict[str, Tensor] | None
    old_velocity: Tensor | None = None
    ref_velocity: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sigma)


Batch = TypeVar("Batch", PairBatch, PictureBatch)


def collate_pairs(rows: Sequence[TrainRow], family: ModelFamily, device: torch.device) -> PairBatch:
    """Put pairs together.

    Raises:
        ValueError: For a log-prob or advantage that isn't finite; the sample is named.
    """
    for row in rows:
        for name in ("log_prob", "advantage"):
            if not np.isfinite(row[name]):  # type: ignore[literal-required]
                raise ValueError(f"sample {row['sample_index']}: {name} at σ = {row['sigma']:.4f} is {row[name]}")  # type: ignore[literal-required]
    outputs = [row.get("model_output") for row in rows]
    return PairBatch(
        latents=_stack(rows, "latents", device),
        next_latents=_stack(rows, "next_latents", device),
        sigma=_numbers(rows, "sigma", device),
        next_sigma=_numbers(rows, "next_sigma", device),
        sigma_max=_numbers(rows, "sigma_max", device),
        timesteps=_numbers(rows, "timestep", device),
        log_probs=_numbers(rows, "log_prob", device),
        advantages=_numbers(rows, "advantage", device),
        trained=_numbers(rows, "trained", device),
        model_outputs=None if any(o is None for o in outputs) else _stack(rows, "model_output", device),
        conditions=_conditions([row["conditions"] for row in rows], family, device),
        negative_conditions=_negative(rows, family, device),
    )


def collate_pictures(
    rows: Sequence[TrainRow], family: ModelFamily, device: torch.device, *, flow_shift: float
) -> PictureBatch:
    """Noise pictures: what is drawn for each comes from its own seed, whatever batch it is in."""
    clean = _stack(rows, "clean", device)
    sigmas, noises = [], []
    for row in rows:
        generator = torch.Generator().manual_seed(row["seed"])
        given = "sigma" in row
        sigmas.append(torch.tensor([row["sigma"]]) if given else logit_normal_sigmas(1, generator, shift=flow_shift))
        noises.append(torch.randn(clean.shape[1:], generator=generator))
    sigma, noise = torch.cat(sigmas).to(device), torch.stack(noises).to(device)
    timesteps = [row.get("timestep", float(s) * TIMESTEPS_A_SIGMA) for row, s in zip(rows, sigmas, strict=True)]
    return PictureBatch(
        clean=clean,
        noise=noise,
        noisy=add_noise(clean, noise, sigma),
        sigma=sigma,
        timesteps=torch.tensor(timesteps, dtype=torch.float32, device=device),
        advantages=torch.tensor([row.get("advantage", 0.0) for row in rows], device=device),
        trained=_numbers(rows, "trained", device),
        conditions=_conditions([row["conditions"] for row in rows], family, device),
        negative_conditions=_negative(rows, family, device),
    )


def prepared_batch(
    settings: FsdpTrainerSettings,
    rows: Sequence[TrainRow],
    family: ModelFamily,
    device: torch.device,
    kind: type[Batch],
) -> Batch:
    """Let `--custom-prepare-train-batch-path` put rows together.

    Raises:
        TypeError: If it returns something else than a `kind` of as many rows.
    """
    assert settings.prepare_train_batch is not None
    args = settings if settings.hook_args is None else settings.hook_args
    batch = settings.prepare_train_batch(args, rows, family, device)
    if not isinstance(batch, kind) or len(batch) != len(rows):
        found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, kind) else type(batch).__name__
        raise TypeError(
            f"--custom-prepare-train-batch-path must return a {kind.__name__} of {len(rows)} rows, not {found}"
        )
    return batch


def _negative(rows: Sequence[Any], family: ModelFamily, device: torch.device) -> dict[str, Tensor] | None:
    entries = [row.get("negative_conditions") for row in rows]
    return None if any(entry is None for entry in entries) else _conditions(entries, family, device)


def _stack(rows: Sequence[Any], name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([row[name] for row in rows])).to(device)


def _numbers(rows: Sequence[Any], name: str, device: torch.device) -> Tensor:
    return torch.tensor([row[name] for row in rows], dtype=torch.float32, device=device)


def _conditions(entries: Sequence[Conditions], family: ModelFamily, device: torch.device) -> dict[str, Tensor]:
    tensors = [{name: torch.tensor(value, device=device) for name, value in entry.items()} for entry in entries]
    return family.collate_conditions(tensors)
