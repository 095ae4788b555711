"""The reverse KL from student to teacher at each response token, for on-policy distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.candidates import NO_CANDIDATE, candidate_log_probs, top_k_log_probs
from llm_rl.algorithms.log_probs import log_probs_from_logits
from llm_rl.algorithms.opd import TopK, sampled_reverse_kl, top_k_reverse_kl
from llm_rl.trainers.fsdp.batch import MicroBatch
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings


def reverse_kl(
    batch: MicroBatch, logits: Tensor, teacher_logits: Tensor | None, settings: FsdpTrainerSettings
) -> Tensor:
    """The estimate that the settings ask for; (T,), no gradient.

    Args:
        batch: Rows, with `old_log_probs`, and with `teacher_log_probs` or `likely_tokens` of a teacher elsewhere.
        logits: (T, V), the student's before the rollout's first optimizer step.
        teacher_logits: (T, V'), or `None` where the teacher is elsewhere. Models of a family share a tokenizer but pad
            their vocabularies differently; ids that only one of them has are no tokens and are left out.
        settings: The kind of estimate.

    Raises:
        ValueError: If the teacher is elsewhere and a trainable token has nothing of it.
    """
    assert batch.old_log_probs is not None
    temperature = settings.temperature
    if teacher_logits is not None:
        size = min(logits.shape[1], teacher_logits.shape[1])
        logits, teacher_logits = logits[:, :size], teacher_logits[:, :size]
    if settings.opd_log_prob_top_k == 0:
        teacher = batch.teacher_log_probs
        if teacher_logits is not None:
            teacher = log_probs_from_logits(teacher_logits, batch.targets, temperature=temperature).log_probs
        elif bool((teacher.isnan() & (batch.mask != 0)).any()):
            raise ValueError("--use-opd: some rows have no teacher log-probs")
        return sampled_reverse_kl(batch.old_log_probs, teacher, batch.mask)
    if teacher_logits is not None:
        tops = _likeliest(logits, teacher_logits, settings.opd_log_prob_top_k, temperature)
    elif batch.likely_tokens is not None:
        tops = batch.likely_tokens
    elif batch.mask.numel():
        raise ValueError("--use-opd: the rows have no teacher's log-probs of likely tokens")
    else:
        return torch.zeros_like(batch.mask)
    return top_k_reverse_kl(
        _with_student(tops[0], logits, temperature),
        _with_student(tops[1], logits, temperature),
        batch.mask,
        strategy=settings.opd_top_k_strategy,
        weight_mode=settings.opd_reward_weight_mode,
    )


def _likeliest(logits: Tensor, teacher_logits: Tensor, k: int, temperature: float) -> tuple[TopK, TopK]:
    """The student's and the teacher's likeliest tokens, with the teacher's log-probs of them."""
    k = min(k, logits.shape[1])
    student_ids, teacher_ids = (top_k_log_probs(x, k, temperature=temperature).ids for x in (logits, teacher_logits))
    student, teacher = (
        TopK(ids, None, candidate_log_probs(teacher_logits, ids, temperature=temperature))
        for ids in (student_ids, teacher_ids)
    )
    return student, teacher


def _with_student(top: TopK, logits: Tensor, temperature: float) -> TopK:
    """With the student's log-probs; ids that it doesn't have are no candidates."""
    ids = top.ids.masked_fill(top.ids >= logits.shape[1], NO_CANDIDATE)
    return TopK(ids, candidate_log_probs(logits, ids, temperature=temperature), top.teacher_log_probs)
