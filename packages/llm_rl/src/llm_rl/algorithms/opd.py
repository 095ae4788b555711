"""On-policy distillation: the reverse KL to a teacher on the student's own samples, as part of the advantage."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from llm_rl.algorithms.candidates import NO_CANDIDATE
from shared_runtime.algorithms.masking import select

TopKStrategy = Literal["only-student", "only-teacher", "intersection", "union", "xor"]
RewardWeightMode = Literal["student_p", "teacher_p", "none"]


class TopK(NamedTuple):
    """One model's k likeliest tokens at each position, as both models score them.

    Attributes:
        ids: int64 (T, K), -1 in unused slots.
        student_log_probs: (T, K), or None where the strategy doesn't need them.
        teacher_log_probs: (T, K), or None where the strategy doesn't need them.
    """

    ids: Tensor
    student_log_probs: Tensor | None
    teacher_log_probs: Tensor | None


def sampled_reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_S - log π_T of the sampled token, an unbiased estimate of the reverse KL; (T,), no gradient.

    Source: Thinking Machines, "On-Policy Distillation" (2025).
    """
    return select(mask, log_probs.detach() - teacher_log_probs.detach())


def distill_advantages(advantages: Tensor, reverse_kl: Tensor, mask: Tensor, *, kl_coef: float = 1.0) -> Tensor:
    """A_t - kl_coef · reverse_kl_t at trainable tokens, 0 elsewhere; (T,). Works on top of any estimator."""
    return select(mask, advantages - kl_coef * reverse_kl.detach())


def top_k_reverse_kl(
    student_top: TopK | None,
    teacher_top: TopK | None,
    mask: Tensor,
    *,
    strategy: TopKStrategy = "only-student",
    weight_mode: RewardWeightMode = "student_p",
) -> Tensor:
    """Σ_{v∈S} w_v·(log π_S(v) - log π_T(v)) over a set of likely tokens at each position.

    The set S: `only-student`, `only-teacher`, tokens in both (`intersection`), in either (`union`), in exactly one
    (`xor`). The weights are proportional to the student's probability, to the teacher's, or uniform (`none`), and sum
    to 1 over S; `xor` takes them as they are (the probability, or 1), since its set may hold next to no mass.

    What each strategy needs: `only-student` both log-probs of `student_top`; `only-teacher` both of `teacher_top`;
    `union` and `xor` all four; `intersection` the student's of `student_top` and the teacher's of `teacher_top`.

    Args:
        student_top: The student's likeliest tokens.
        teacher_top: The teacher's likeliest tokens.
        mask: (T,), non-zero means trainable.
        strategy: `--opd-top-k-strategy`.
        weight_mode: `--opd-reward-weight-mode`.

    Returns:
        (T,), no gradient; 0 at masked tokens and where the set is empty.

    Raises:
        ValueError: For an unknown strategy or mode, or an input that the strategy needs and doesn't get.

    Paper: Rethinking On-Policy Distillation, arXiv:2604.13016.
    """
    for name, value, choices in (("strategy", strategy, TopKStrategy), ("weight_mode", weight_mode, RewardWeightMode)):
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")
    student, teacher, used = _selected(student_top, teacher_top, strategy)
    used = used & (mask != 0)[:, None]
    student, teacher = select(used, student.detach()), select(used, teacher.detach())
    if weight_mode == "none":
        log_weights = torch.zeros_like(student)
    else:
        log_weights = student if weight_mode == "student_p" else teacher
    log_weights = select(used, log_weights, -torch.inf)
    if strategy != "xor":
        # An empty set has log-mass -inf; anything finite in its place leaves its weights at 0.
        log_mass = log_weights.logsumexp(dim=1, keepdim=True)
        log_weights = log_weights - log_mass.masked_fill(log_mass.isneginf(), 0.0)
    weights = log_weights.exp()
    return select(weights, weights * select(weights, student - teacher)).sum(dim=1)


def _selected(
    student_top: TopK | None, teacher_top: TopK | None, strategy: TopKStrategy
) -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher log-probs (T, ·) of the candidates, and which of them form the set."""
    if strategy == "only-student":
        return _both(student_top, "student_top", strategy)
    if strategy == "only-teacher":
        return _both(teacher_top, "teacher_top", strategy)
    if student_top is None or teacher_top is None:
        raise ValueError(f"strategy {strategy} needs the likeliest tokens of both student and teacher")
    same = (student_top.ids[:, :, None] == teacher_top.ids[:, None, :]) & (student_top.ids != NO_CANDIDATE)[:, :, None]
    if strategy == "intersection":
        if student_top.student_log_probs is None or teacher_top.teacher_log_probs is None:
            raise ValueError("strategy intersection needs the student's log-probs of its own tokens, and the teacher's")
        matched = select(same, teacher_top.teacher_log_probs[:, None, :].expand_as(same)).sum(dim=2)
        return student_top.student_log_probs, matched, same.any(dim=2)
    s_student, s_teacher, s_used = _both(student_top, "student_top", strategy)
    t_student, t_teacher, t_used = _both(teacher_top, "teacher_top", strategy)
    if strategy == "xor":
        s_used = s_used & ~same.any(dim=2)
    t_used = t_used & ~same.any(dim=1)
    sides = ((s_student, t_student), (s_teacher, t_teacher), (s_used, t_used))
    student, teacher, used = (torch.cat(pair, dim=1) for pair in sides)
    return student, teacher, used


def _both(top: TopK | None, name: str, strategy: TopKStrategy) -> tuple[Tensor, Tensor, Tensor]:
    if top is None or top.student_log_probs is None or top.teacher_log_probs is None:
        raise ValueError(f"strategy {strategy} needs {name} with the log-probs of student and teacher")
    return top.student_log_probs, top.teacher_log_probs, top.ids != NO_CANDIDATE
