"""Score centering in the trainer: the loss over the candidates that the rollout recorded, and what is watched of it."""

from __future__ import annotations

from torch import Tensor

from llm_rl.algorithms.candidates import candidate_log_probs, support_log_probs
from llm_rl.algorithms.reduction import masked_sum
from llm_rl.algorithms.score_centering import score_centering_loss
from llm_rl.trainers.fsdp.batch import MicroBatch
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.algorithms.kl import kl_estimate


def centred_loss(
    batch: MicroBatch, logits: Tensor, log_probs: Tensor, weights: Tensor, settings: FsdpTrainerSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, to be summed over micro-batches and ranks, and its metrics, likewise.

    Args:
        batch: Rows with candidates, rollout log-probs and advantages.
        logits: (T, V).
        log_probs: (T,), of the sampled tokens, over the support where there is one.
        weights: (T,), from `loss.loss_weights`.
        settings: Importance weights and bounds.

    Raises:
        ValueError: If the rows have no candidates, or a trainable token no rollout log-prob.
    """
    assert batch.advantages is not None
    if batch.candidates is None:
        if batch.mask.numel():
            raise ValueError("--loss-type score_centering: the rows have no rollout_topk_token_ids")
        return log_probs.sum(), {name: log_probs.new_zeros(()) for name in _METRICS}
    if bool((~batch.has_rollout_log_probs & (batch.mask != 0)).any()):
        raise ValueError("--loss-type score_centering: some rows have no rollout log-probs")
    ids, rollout_head = batch.candidates
    temperature, mask = settings.temperature, batch.mask
    if batch.support_ids is None:
        head = candidate_log_probs(logits, ids, temperature=temperature, mask=mask)
    else:
        head = support_log_probs(logits, batch.targets, ids, temperature=temperature, mask=mask).candidate_log_probs
    centred = score_centering_loss(
        log_probs,
        batch.rollout_log_probs,
        head,
        rollout_head,
        batch.advantages,
        mask,
        importance_sampling=settings.score_centering_is,
        tis_clip=settings.score_centering_tis_clip,
        mis_low=settings.score_centering_mis_low,
        mis_high=settings.score_centering_mis_high,
    )
    watched = (
        centred.correction,
        centred.train_head_mass,
        centred.rollout_head_mass,
        centred.tail_ratio,
        centred.importance_weight,
        kl_estimate(batch.rollout_log_probs, log_probs, "k3", mask=mask),
    )
    metrics = {name: masked_sum(values.detach(), weights) for name, values in zip(_METRICS, watched, strict=True)}
    return masked_sum(centred.loss, weights), metrics


_METRICS = (
    "sc_correction",
    "sc_train_head_mass",
    "sc_rollout_head_mass",
    "sc_tail_ratio",
    "sc_importance_weight",
    "train_rollout_kl",
)
