"""From a micro-batch's log-probs to the loss that is summed over micro-batches and ranks, and to what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llm_rl.algorithms.dpo_loss import dpo_loss
from llm_rl.algorithms.log_probs import TokenLogProbs
from llm_rl.algorithms.metrics import ppo_kl
from llm_rl.algorithms.policy_loss import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    opsm_keep,
    sequence_log_ratio,
    token_log_ratio,
)
from llm_rl.algorithms.reduction import masked_sum, token_weights
from llm_rl.algorithms.score_centering import usable_for_kl
from llm_rl.algorithms.sft_loss import sft_loss
from llm_rl.trainers.fsdp.batch import MicroBatch
from llm_rl.trainers.fsdp.score_centering import centred_loss
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.algorithms.kl import kl_estimate


@dataclass
class LossOutput:
    """A micro-batch's share of the step.

    Attributes:
        loss: Scalar with a gradient; the step's loss is its sum over micro-batches and ranks.
        metrics: Scalars without gradient, to be summed likewise.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def compute_loss(
    batch: MicroBatch,
    logits: Tensor,
    output: TokenLogProbs | None,
    settings: FsdpTrainerSettings,
    *,
    global_num_samples: int,
    global_num_tokens: int,
) -> LossOutput:
    """The loss that the settings ask for.

    Args:
        batch: Rows, with advantages for the policy loss.
        logits: (T, V), read by custom losses and score centering.
        output: Log-probs (and entropy) of the response tokens; `None` for custom losses.
        settings: The objective.
        global_num_samples: Samples of the optimizer step over all ranks.
        global_num_tokens: Trainable tokens of the optimizer step over all ranks.
    """
    weights = loss_weights(batch, settings, global_num_samples, global_num_tokens)
    if settings.loss_type == "custom_loss":
        return custom_loss(batch, logits, weights, settings)
    assert output is not None
    if settings.loss_type == "score_centering":
        result = _centred_loss(batch, logits, output.log_probs, weights, settings)
    elif settings.loss_type == "sft_loss":
        result = LossOutput(masked_sum(sft_loss(output.log_probs, batch.mask), weights))
    elif settings.loss_type == "dpo_loss":
        result = _preference_loss(batch, output.log_probs, settings, num_pairs=max(global_num_samples // 2, 1))
    else:
        denominator = global_num_tokens if settings.calculate_per_token_loss else global_num_samples
        result = _policy_loss(batch, output.log_probs, weights, settings, max(denominator, 1))
    if output.entropy is not None:
        entropy = masked_sum(output.entropy, weights)
        result.metrics["entropy_loss"] = entropy.detach()
        if settings.entropy_coef:
            result.loss = result.loss - settings.entropy_coef * entropy
    result.metrics["loss"] = result.loss.detach()
    return result


def loss_weights(
    batch: MicroBatch, settings: FsdpTrainerSettings, global_num_samples: int, global_num_tokens: int
) -> Tensor:
    """Each response token's weight in the step's mean; (T,)."""
    return token_weights(
        batch.mask,
        batch.segments,
        per_token=settings.calculate_per_token_loss,
        constant=settings.loss_length_divisor,
        global_num_samples=global_num_samples,
        global_num_tokens=global_num_tokens,
        sample_num_tokens=batch.sample_num_tokens,
        dtype=batch.mask.dtype,
    )


def old_log_probs(batch: MicroBatch, log_probs: Tensor, *, use_rollout_logprobs: bool) -> Tensor:
    """Log-probs of the policy that the ratio is taken against, without gradient; (T,).

    On fresh data that is the policy before the rollout's first optimizer step: the stored log-probs, or the current
    ones while there was no step yet. Tokens that older weights drew, and all with `--use-rollout-logprobs`, take the
    engine's log-probs, since a ratio against the current policy would be 1 off-policy too. Under a rollout correction
    the importance weights bridge that gap, and the ratio is against the recomputed log-probs everywhere.

    Raises:
        ValueError: If the engine's log-probs are asked for and a trainable token has none.
    """
    old = (log_probs if batch.old_log_probs is None else batch.old_log_probs).detach()
    if batch.importance_weights is not None:
        return old
    if not use_rollout_logprobs:
        return torch.where(batch.stale, batch.rollout_log_probs, old)
    if bool((~batch.has_rollout_log_probs & (batch.mask != 0)).any()):
        raise ValueError("--use-rollout-logprobs: some rows have no rollout log-probs")
    return batch.rollout_log_probs


def _preference_loss(
    batch: MicroBatch, log_probs: Tensor, settings: FsdpTrainerSettings, *, num_pairs: int
) -> LossOutput:
    """DPO's loss, and what is watched beside it: the implicit rewards, how often and how far the right side leads."""
    assert batch.ref_log_probs is not None
    pairs = dpo_loss(
        log_probs,
        batch.ref_log_probs,
        batch.mask,
        batch.segments,
        beta=settings.dpo_beta,
        label_smoothing=settings.dpo_label_smoothing,
    )
    margins = pairs.chosen_rewards - pairs.rejected_rewards
    watched = {
        "rewards/chosen": pairs.chosen_rewards,
        "rewards/rejected": pairs.rejected_rewards,
        "rewards/accuracies": (margins > 0).to(margins.dtype),
        "rewards/margins": margins,
    }
    metrics = {name: values.sum() / num_pairs for name, values in watched.items()}
    return LossOutput(pairs.loss.sum() / num_pairs, metrics)


def _policy_loss(
    batch: MicroBatch, log_probs: Tensor, weights: Tensor, settings: FsdpTrainerSettings, denominator: int
) -> LossOutput:
    assert batch.advantages is not None
    old = old_log_probs(batch, log_probs, use_rollout_logprobs=settings.use_rollout_logprobs)
    per_token = _surrogate(batch, log_probs, old, settings)
    losses = per_token.loss if batch.importance_weights is None else per_token.loss * batch.importance_weights
    keep = None
    if settings.use_opsm:
        keep = opsm_keep(log_probs, old, batch.advantages, batch.mask, batch.segments, delta=settings.opsm_delta)
        losses = losses * keep
    if settings.pg_loss_reducer is None:
        pg_loss = masked_sum(losses, weights)
    else:
        reducer = settings.pg_loss_reducer(
            batch.total_lengths,
            batch.response_lengths,
            list(batch.mask.split(batch.response_lengths)),
            settings.calculate_per_token_loss,
        )
        pg_loss = reducer(losses) / denominator
    result = LossOutput(pg_loss)
    result.metrics["pg_loss"] = pg_loss.detach()
    result.metrics["pg_clipfrac"] = masked_sum(per_token.clipped, weights)
    if keep is not None:
        result.metrics["opsm_clipfrac"] = masked_sum(1 - keep, weights)
    if batch.importance_weights is not None:
        result.metrics["ois"] = masked_sum(per_token.ratio, weights)
    result.metrics["ppo_kl"] = masked_sum(ppo_kl(log_probs, old, batch.mask), weights)
    if settings.use_kl_loss:
        _add_kl(result, batch, log_probs, weights, settings, behaviour=old, mask=batch.mask)
    return result


def _centred_loss(
    batch: MicroBatch, logits: Tensor, log_probs: Tensor, weights: Tensor, settings: FsdpTrainerSettings
) -> LossOutput:
    """Score centering; tokens whose divergence from the reference would overflow have no part in its mean."""
    loss, metrics = centred_loss(batch, logits, log_probs, weights, settings)
    result = LossOutput(loss, metrics | {"pg_loss": loss.detach()})
    if settings.use_kl_loss:
        assert batch.ref_log_probs is not None
        behaviour = batch.rollout_log_probs
        drawn_by = behaviour if settings.use_unbiased_kl else None
        usable = usable_for_kl(log_probs, batch.ref_log_probs, batch.mask, rollout_log_probs=drawn_by)
        result.metrics["kl_invalid_fraction"] = masked_sum(1 - usable.to(weights.dtype), weights)
        _add_kl(result, batch, log_probs, weights, settings, behaviour=behaviour, mask=usable)
    return result


def _add_kl(
    result: LossOutput,
    batch: MicroBatch,
    log_probs: Tensor,
    weights: Tensor,
    settings: FsdpTrainerSettings,
    *,
    behaviour: Tensor,
    mask: Tensor,
) -> None:
    """Measure the divergence from the reference at the tokens of `mask` and add it to the loss where it has a weight.

    `behaviour` has the log-probs of the policy that drew the tokens, for the unbiased estimate.
    """
    assert batch.ref_log_probs is not None
    drawn_by = behaviour if settings.use_unbiased_kl else None
    kl = kl_estimate(log_probs, batch.ref_log_probs, settings.kl_loss_type, mask=mask, behavior_log_probs=drawn_by)
    kl_loss = masked_sum(kl, weights)
    result.metrics["kl_loss"] = kl_loss.detach()
    if settings.kl_loss_coef:
        result.loss = result.loss + settings.kl_loss_coef * kl_loss


def _surrogate(batch: MicroBatch, log_probs: Tensor, old: Tensor, settings: FsdpTrainerSettings) -> PolicyLoss:
    assert batch.advantages is not None
    if settings.advantage_estimator == "gspo":
        log_ratio = sequence_log_ratio(log_probs, old, batch.mask, batch.segments)
    else:
        log_ratio = token_log_ratio(log_probs, old, batch.mask)
    if settings.advantage_estimator == "cispo":
        return cispo_loss(
            log_probs,
            log_ratio,
            batch.advantages,
            batch.mask,
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
        )
    return clipped_policy_loss(
        log_ratio,
        batch.advantages,
        batch.mask,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
    )


def custom_loss(batch: MicroBatch, logits: Tensor, weights: Tensor, settings: FsdpTrainerSettings) -> LossOutput:
    """Call the user's loss: `function(args, batch, logits, reduce) -> (loss, metrics)`.

    `batch` is a :class:`MicroBatch`, `logits` are (T, V) over the temperature, and `reduce` turns values per response
    token (T,) into their mean over the samples (or tokens) of the whole step, this micro-batch's part of it. What the
    function returns is summed over micro-batches and ranks, so a loss that does not use `reduce` must hold its
    denominator itself.

    Raises:
        TypeError: If it returns something else.
    """
    reduce: Callable[[Tensor], Tensor] = lambda values: masked_sum(values, weights)  # noqa: E731
    assert settings.custom_loss is not None
    args = settings if settings.hook_args is None else settings.hook_args
    returned = settings.custom_loss(args, batch, logits / settings.temperature, reduce)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
        raise TypeError("the custom loss must return (loss tensor, dict of metrics)")
    loss, metrics = returned
    reported = {key: torch.as_tensor(value).detach() for key, value in metrics.items()}
    return LossOutput(loss, {**reported, "loss": loss.detach()})
