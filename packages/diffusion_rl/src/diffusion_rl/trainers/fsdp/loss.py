"""From a micro-batch's velocity to the loss that is summed over micro-batches and ranks, and to what is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffusion_rl.algorithms.flow_grpo import flow_grpo_loss, reference_kl
from diffusion_rl.algorithms.grpo_guard import guard_log_ratio
from diffusion_rl.algorithms.nft import nft_loss, optimality, velocity_distance
from diffusion_rl.algorithms.sft import flow_matching_loss
from diffusion_rl.algorithms.step_dynamics import StepDynamics, Transition, step_dynamics
from diffusion_rl.trainers.fsdp.batch import PairBatch, PictureBatch
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings


@dataclass
class LossOutput:
    """A micro-batch's share of the step.

    Attributes:
        loss: Scalar with a gradient; the step's loss is its sum over micro-batches and ranks.
        metrics: Scalars without gradient, to be summed likewise.
        log_probs: (B,), of the policy loss, without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    log_probs: Tensor | None = None


def dynamics_of(settings: FsdpTrainerSettings) -> StepDynamics:
    """The step dynamics that the rollout had."""
    if settings.sde_step_backend is not None:
        return settings.sde_step_backend()
    return step_dynamics(settings.diffusion_sde_type)


def step_of(batch: PairBatch, velocity: Tensor, settings: FsdpTrainerSettings) -> Transition:
    """The distribution of the next latents under a velocity, at the exact noise levels of the rollout."""
    return dynamics_of(settings).transition(
        batch.latents,
        velocity,
        batch.sigma,
        batch.next_sigma,
        sigma_max=batch.sigma_max,
        noise_level=settings.diffusion_noise_level,
    )


def log_probs_of(batch: PairBatch, transition: Transition, settings: FsdpTrainerSettings) -> Tensor:
    """(B,), the log-prob of the latents that came next, mean over their elements."""
    return dynamics_of(settings).log_prob(
        batch.next_latents, transition, constants=not settings.diffusion_log_prob_no_const
    )


def policy_loss(batch: PairBatch, velocity: Tensor, settings: FsdpTrainerSettings, *, global_pairs: int) -> LossOutput:
    """Flow-GRPO's loss, the mean over all trained pairs of the optimizer step, this micro-batch's part of it.

    Args:
        batch: B pairs.
        velocity: (B, ...), of the model that trains.
        settings: The objective.
        global_pairs: Trained pairs of the optimizer step over all ranks.

    Raises:
        ValueError: If GRPO-Guard is asked for and the rollout's velocities are missing.
    """
    transition = step_of(batch, velocity, settings)
    log_probs = log_probs_of(batch, transition, settings)
    log_ratio = log_probs - batch.log_probs
    if settings.diffusion_grpo_guard:
        if batch.model_outputs is None:
            raise ValueError("--diffusion-grpo-guard needs the rollout's model outputs: sample with debug tensors")
        old = step_of(batch, batch.model_outputs, settings)
        log_ratio = guard_log_ratio(log_probs, batch.log_probs, transition.mean, old.mean, transition.std)
    weights = batch.trained / max(global_pairs, 1)
    result = flow_grpo_loss(
        log_ratio,
        batch.advantages,
        clip_range=settings.diffusion_clip_range,
        adv_clip_max=settings.diffusion_adv_clip_max,
    )
    loss = (result.loss * weights).sum()
    metrics = {
        "pg_loss": loss.detach(),
        "pg_clipfrac": (result.clipped * weights).sum(),
        "ratio_abs_minus_1": ((result.ratio - 1.0).abs() * weights).sum(),
    }
    if batch.ref_means is not None:
        kl = (reference_kl(transition.mean, batch.ref_means, transition.std) * weights).sum()
        metrics["kl_loss"] = kl.detach()
        if settings.diffusion_kl_beta:
            loss = loss + settings.diffusion_kl_beta * kl
    metrics["loss"] = loss.detach()
    return LossOutput(loss, metrics, log_probs.detach())


def custom_loss(batch: PairBatch, velocity: Tensor, settings: FsdpTrainerSettings, *, global_pairs: int) -> LossOutput:
    """Call the user's loss: `function(args, batch, velocity, reduce) -> (loss, metrics)`.

    `batch` is a :class:`PairBatch`, `velocity` (B, ...) the guided one of the model that trains, and `reduce` turns a
    value a pair (B,) into the mean over the trained pairs of the optimizer step, this micro-batch's part of it. What
    the function returns is summed over micro-batches and ranks, so a loss that does not use `reduce` must hold its
    denominator itself.

    Raises:
        TypeError: If it returns something else.
    """
    assert settings.custom_loss is not None
    weights = batch.trained / max(global_pairs, 1)
    args = settings if settings.hook_args is None else settings.hook_args
    returned = settings.custom_loss(args, batch, velocity, lambda values: (values * weights).sum())
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
        raise TypeError("--custom-loss-function-path must return (loss tensor, dict of metrics)")
    loss, metrics = returned
    with torch.no_grad():
        log_probs = log_probs_of(batch, step_of(batch, velocity, settings), settings)
    reported = {key: torch.as_tensor(value).detach() for key, value in metrics.items()}
    return LossOutput(loss, {**reported, "loss": loss.detach()}, log_probs)


def sft_loss(batch: PictureBatch, velocity: Tensor, *, global_pairs: int) -> LossOutput:
    """The flow-matching error, the mean over all pictures of the optimizer step, this micro-batch's part of it."""
    per_picture = flow_matching_loss(velocity, batch.clean, batch.noise)
    loss = (per_picture * batch.trained / max(global_pairs, 1)).sum()
    return LossOutput(loss, {"loss": loss.detach()})


def nft_loss_of(
    batch: PictureBatch, velocity: Tensor, settings: FsdpTrainerSettings, *, global_pairs: int
) -> LossOutput:
    """DiffusionNFT's loss, the mean over all trained pairs of the optimizer step, this micro-batch's part of it."""
    assert batch.old_velocity is not None
    weights = batch.trained / max(global_pairs, 1)
    result = nft_loss(
        velocity,
        batch.old_velocity,
        batch.clean,
        batch.noisy,
        batch.sigma,
        optimality(batch.advantages, adv_clip_max=settings.diffusion_adv_clip_max),
        beta=settings.diffusion_nft_beta,
        adv_clip_max=settings.diffusion_adv_clip_max,
        adaptive_weight=settings.diffusion_nft_adaptive_weight,
    )
    loss = (result.loss * weights).sum()
    metrics = {
        "nft_loss": loss.detach(),
        "nft_positive": (result.positive * weights).sum(),
        "nft_negative": (result.negative * weights).sum(),
        "old_velocity_distance": (velocity_distance(velocity.detach(), batch.old_velocity) * weights).sum(),
    }
    if batch.ref_velocity is not None:
        kl = (velocity_distance(velocity, batch.ref_velocity) * weights).sum()
        metrics["kl_loss"] = kl.detach()
        if settings.diffusion_kl_beta:
            loss = loss + settings.diffusion_kl_beta * kl
    metrics["loss"] = loss.detach()
    return LossOutput(loss, metrics)


def output_differences(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far two velocities are apart: sum of |difference|, its maximum, and that over the scale of `theirs`."""
    difference = (ours.detach().float() - theirs.float()).abs()
    largest = difference.max()
    return difference.sum(), largest, largest / theirs.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
