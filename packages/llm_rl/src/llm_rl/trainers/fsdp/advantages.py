"""Advantages of all micro-batches of a rollout, whitened over every rank where asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_rl.algorithms.advantages import (
    broadcast_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    token_rewards,
)
from llm_rl.algorithms.gae import gae
from llm_rl.algorithms.metrics import AllReduce
from llm_rl.algorithms.whitening import whiten
from llm_rl.trainers.fsdp.batch import MicroBatch
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.algorithms.kl import kl_estimate


def needs_whitening(settings: FsdpTrainerSettings) -> bool:
    """REINFORCE++ is defined with whitening over the batch; the others do it on request."""
    return settings.normalize_advantages or settings.advantage_estimator.startswith("reinforce_plus_plus")


def set_advantages(batches: Sequence[MicroBatch], settings: FsdpTrainerSettings, all_reduce_sum: AllReduce) -> None:
    """Compute advantages (and the critic's targets) of this rank's micro-batches, in place.

    Every rank must call, since whitening reduces.
    """
    for batch in batches:
        batch.advantages = _advantages(batch, settings)
    if needs_whitening(settings):
        # One reduction over the whole rollout, so that neither micro-batches nor ranks matter.
        white = whiten(
            torch.cat([b.advantages for b in batches if b.advantages is not None]),
            torch.cat([b.mask for b in batches]),
            all_reduce_sum=all_reduce_sum,
        )
        for batch, piece in zip(batches, white.split([b.mask.numel() for b in batches]), strict=True):
            batch.advantages = piece


def _advantages(batch: MicroBatch, settings: FsdpTrainerSettings) -> Tensor:
    estimator = settings.advantage_estimator
    if estimator == "ppo":
        assert batch.values is not None
        rewards = token_rewards(batch.rewards, batch.mask, batch.segments)
        advantages, batch.returns = gae(
            rewards, batch.values, batch.mask, batch.segments, gamma=settings.gamma, lam=settings.lambd
        )
        return advantages
    if estimator in ("grpo", "gspo", "cispo", "rloo"):
        return broadcast_advantages(batch.rewards, batch.mask, batch.segments)
    kl = None
    if settings.kl_coef > 0:
        assert batch.old_log_probs is not None
        assert batch.ref_log_probs is not None
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, settings.kl_loss_type, mask=batch.mask)
    if estimator == "reinforce_plus_plus":
        return reinforce_plus_plus_returns(
            batch.rewards, batch.mask, batch.segments, kl=kl, kl_coef=settings.kl_coef, gamma=settings.gamma
        )
    if estimator == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline_advantages(
            batch.rewards, batch.mask, batch.segments, kl=kl, kl_coef=settings.kl_coef
        )
    raise ValueError(f"unknown advantage estimator {estimator!r}")
