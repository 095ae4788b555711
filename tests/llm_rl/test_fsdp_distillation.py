"""On-policy distillation in the trainer: both kinds of teacher, the gradient, and what comes on top of what."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, make_rows, make_trainer, plan, row_log_probs
from fsdp_reference import assert_same_gradients, gradients, plain_model, policy_gradient_loss

TEMPERATURE = 0.7


@pytest.fixture
def start(tiny_model_dir):
    started = []

    def build(**changes):
        started.append(make_trainer(tiny_model_dir, use_opd=True, clip_grad=0.0, **changes))
        return started[-1]

    yield build
    for trainer in started:
        trainer.shutdown()


def distributions(model: torch.nn.Module, row: dict) -> torch.Tensor:
    """Log-probs (R, V) from a plain forward of that sequence alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(row["tokens"])[None]).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1)[len(row["tokens"]) - 1 - row["response_length"] :]


def set_reverse_kl(student: list[float], teacher: list[float], k: int, strategy: str, mode: str) -> float:
    """One position, by Python's own sets and dicts."""
    s_top, t_top = (set(sorted(range(len(x)), key=x.__getitem__)[-k:]) for x in (student, teacher))
    tokens = {
        "only-student": s_top,
        "only-teacher": t_top,
        "intersection": s_top & t_top,
        "union": s_top | t_top,
        "xor": s_top ^ t_top,
    }[strategy]
    weigh = {"student_p": lambda v: math.exp(student[v]), "teacher_p": lambda v: math.exp(teacher[v])}
    weights = {v: weigh.get(mode, lambda v: 1.0)(v) for v in tokens}
    total = sum(weights.values()) if strategy != "xor" else 1.0
    return sum(w / total * (student[v] - teacher[v]) for v, w in weights.items())


@pytest.mark.parametrize(
    ("k", "strategy", "mode"),
    [
        (0, "only-student", "student_p"),
        (4, "only-student", "student_p"),
        (4, "only-teacher", "teacher_p"),
        (5, "intersection", "none"),
        (3, "union", "student_p"),
        (4, "xor", "teacher_p"),
    ],
)
def test_gradient_with_a_teacher_in_the_trainer(start, tiny_model_dir, tiny_teacher_dir, k, strategy, mode):
    rows = make_rows(30, groups=2)
    student, teacher = (plain_model(d, torch.float64) for d in (tiny_model_dir, tiny_teacher_dir))
    advantages, kl = [], []
    for row in rows:
        s, t = distributions(student, row), distributions(teacher, row)
        if k == 0:
            sampled = torch.as_tensor(row["tokens"][-row["response_length"] :])[:, None]
            divergence = (s - t).gather(1, sampled)[:, 0].tolist()
        else:
            pairs = zip(s.tolist(), t.tolist(), strict=True)
            divergence = [set_reverse_kl(*pair, k, strategy, mode) for pair in pairs]
        advantages.append(row["reward"] - 0.5 * np.array(divergence))
        kl += [d for d, m in zip(divergence, row["loss_mask"], strict=True) if m]
    loss = policy_gradient_loss(student, rows, temperature=TEMPERATURE, advantages=advantages)
    expected = gradients(student, loss)
    trainer = start(
        rollout_temperature=TEMPERATURE,
        opd_teacher_load=tiny_teacher_dir,
        opd_kl_coef=0.5,
        opd_log_prob_top_k=k,
        opd_top_k_strategy=strategy,
        opd_reward_weight_mode=mode,
    )
    seen = capture_gradients(trainer)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 3}):
        metrics = trainer.train(0, plan(rows, **layout)[0])
        assert_same_gradients(seen, expected, rtol=0, atol=3e-6)
        assert metrics["train/opd_reverse_kl"] == pytest.approx(np.mean(kl), rel=1e-4)


def test_a_teacher_elsewhere_gives_the_same_gradient(start, tiny_teacher_dir):
    """Log-probs that come with the rows, at temperature 1; a trainable token without one is an error."""
    rows = make_rows(31, groups=2)
    loaded = start(opd_teacher_load=tiny_teacher_dir)
    expected = capture_gradients(loaded)
    metrics = loaded.train(0, plan(rows)[0])
    remote = start()
    found = capture_gradients(remote)
    with pytest.raises(ValueError, match="some rows have no teacher log-probs"):
        remote.train(0, plan(rows)[0])
    teacher = plain_model(tiny_teacher_dir)
    for row in rows:
        row["teacher_log_probs"] = row_log_probs(teacher, row).detach().numpy()
    assert remote.train(0, plan(rows)[0]) == pytest.approx(metrics, abs=1e-5)
    assert_same_gradients(found, expected, rtol=0, atol=1e-5)
