"""Rollout corrections in the trainer: against plain loops, and whatever the micro-batches are."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, make_rows, make_trainer, plan, row_log_probs
from fsdp_reference import assert_same_gradients, gradients, plain_model, policy_gradient_loss

from llm_rl.algorithms.mis import mis_correction
from llm_rl.algorithms.rollout_correction import icepop

TOLERANCE = 3e-6
REJECTING = {
    "use_tis": True,
    "use_rs": True,
    "custom_tis_function": mis_correction,
    "tis_upper_bound": 1.5,
    "rs_lower_bound": 0.7,
    "rs_upper_bound": 1.4,
}


@pytest.fixture
def start(tiny_model_dir):
    """Start trainers on the tiny model; they are shut down at the end."""
    started = []

    def build(**changes):
        started.append(make_trainer(tiny_model_dir, clip_grad=0.0, **changes))
        return started[-1]

    yield build
    for trainer in started:
        trainer.shutdown()


def gradient_of(trainer, rows, *, rollout_id=0, **layout):
    """Metrics and gradient of one optimizer step that isn't taken."""
    seen = capture_gradients(trainer)
    metrics = trainer.train(rollout_id, plan(rows, **layout)[0])
    return metrics, dict(seen)


def token_ratios(model, rows) -> list[torch.Tensor]:
    """π_train/π_rollout of each row's response."""
    with torch.no_grad():
        return [(row_log_probs(model, row) - torch.as_tensor(row["rollout_log_probs"]).double()).exp() for row in rows]


@pytest.mark.parametrize(
    ("settings", "weigh"),
    [
        ({"tis_clip": 1.1}, lambda w: w.clamp(0, 1.1)),
        ({"tis_clip": 1.1, "tis_clip_low": 0.95}, lambda w: w.clamp(0.95, 1.1)),
        ({"custom_tis_function": icepop, "tis_clip": 1.1}, lambda w: w * ((w >= 0.5) & (w <= 1.1))),
    ],
)
def test_weights_multiply_the_loss(start, tiny_model_dir, settings, weigh):
    """Rows of older weights too: their ratio is 1 before the first step, and the weight is the whole correction."""
    rows = make_rows(0, version=3)
    for row in rows[::2]:
        row["weight_version"] = 1
    model = plain_model(tiny_model_dir, torch.float64)
    ratios = token_ratios(model, rows)
    assert min(float(r.min()) for r in ratios) < 0.95 < 1.1 < max(float(r.max()) for r in ratios)
    weights = [weigh(r) for r in ratios]
    expected = gradients(model, policy_gradient_loss(model, rows, weights=weights))
    metrics, found = gradient_of(start(use_tis=True, **settings), rows, rollout_id=3)
    assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
    masks = np.concatenate([row["loss_mask"] for row in rows]) != 0
    assert metrics["train/tis"] == pytest.approx(np.concatenate(ratios)[masks].mean(), rel=1e-5)
    assert metrics["train/ppo_kl"] == 0
    assert metrics["train/ois"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_rejected_tokens_leave_the_denominators(start, tiny_model_dir, per_token):
    """As if the loss mask had been 0 there; a sample that loses all its tokens still counts as a sample."""
    rows = make_rows(1, responses=(1, 6))
    for row in rows[:2]:
        row["sample_index"] = 0  # two rows of one sample, which micro-batches of one row divide
    rows[5]["rollout_log_probs"] += 3  # rejected as a whole
    model = plain_model(tiny_model_dir, torch.float64)
    ratios, kept = token_ratios(model, rows), copy.deepcopy(rows)
    for row, r in zip(kept, ratios, strict=True):
        row["loss_mask"] = row["loss_mask"] * ((r >= 0.7) & (r <= 1.4)).numpy()
    assert 0 < sum(row["loss_mask"].sum() for row in kept) < sum(row["loss_mask"].sum() for row in rows)
    assert rows[5]["loss_mask"].sum() > 0 == kept[5]["loss_mask"].sum()
    weights = [r.clamp(max=1.5) for r in ratios]
    expected = gradients(model, policy_gradient_loss(model, kept, per_token=per_token, weights=weights))
    trainer = start(calculate_per_token_loss=per_token, **REJECTING)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 1}):
        _, found = gradient_of(trainer, rows, **layout)
        assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_do_not_matter(start, level):
    """Normalised weights, sequence-level rejection, the veto, KL and entropy."""
    rows = make_rows(2)
    long = next(row for row in rows if row["loss_mask"].sum() > 2)
    long["rollout_log_probs"][np.flatnonzero(long["loss_mask"])[0]] = 9.0  # vetoed
    trainer = start(
        **REJECTING | {"tis_level": level, "tis_batch_normalize": True, "rs_level": "sequence"},
        rs_veto_threshold=1e-3,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    whole_metrics, whole = gradient_of(trainer, rows)
    assert 0 < whole_metrics["train/mis_rs_catastrophic_seq_fraction"] < 1
    assert whole_metrics["train/mis_batch_norm_factor"] != 1
    for layout in ({"max_tokens_per_gpu": None, "micro_batch_size": 1}, {"max_tokens_per_gpu": 40}):
        metrics, found = gradient_of(trainer, rows, **layout)
        assert_same_gradients(found, whole, rtol=0, atol=TOLERANCE)
        assert metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-6)  # single precision: a perplexity of 16


def test_everything_rejected_gives_zero(start):
    rows = make_rows(3, groups=1)
    for row in rows:
        row["rollout_log_probs"] += 5
    metrics, found = gradient_of(start(**REJECTING), rows)
    assert metrics["train/loss"] == 0
    assert all(not g.any() for g in found.values())


def test_metrics_alone_change_nothing(start):
    rows = make_rows(4)
    _, plain = gradient_of(start(), rows)
    metrics, found = gradient_of(start(get_mismatch_metrics=True), rows)
    assert_same_gradients(found, plain, rtol=0, atol=TOLERANCE)
    assert metrics["train/mis_k3_kl"] > 0
    assert metrics["train/mis_rollout_ppl"] == pytest.approx(
        np.mean([
            math.exp(-float(row["rollout_log_probs"][row["loss_mask"] != 0].mean()))
            for row in rows
            if row["loss_mask"].any()
        ]),
        rel=1e-5,
    )  # fmt: skip


def test_rows_without_log_probs_are_refused(start):
    rows = make_rows(5)
    del rows[2]["rollout_log_probs"]
    with pytest.raises(ValueError, match="needs the engine's log-probs"):
        start(use_tis=True).train(0, plan(rows)[0])


def test_sequence_masking_and_unbiased_kl_against_plain_loops(start, tiny_model_dir):
    """Rows of older weights: the old policy is the engine's, so sequences have drifted and the ratio is not 1."""
    rows = make_rows(6, version=0)
    model = plain_model(tiny_model_dir, torch.float64)
    old = {i: torch.as_tensor(row["rollout_log_probs"]).double() for i, row in enumerate(rows)}
    log_probs = [row_log_probs(model, row) for row in rows]
    samples, weights, kl = len(rows), [], torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        mask = torch.as_tensor(row["loss_mask"]).double()
        count = mask.sum().clamp(min=1)
        drift = ((old[i] - log_probs[i].detach()) * mask).sum() / count
        weights.append(torch.full_like(old[i], 0.0 if row["reward"] < 0 and drift > 0.05 else 1.0))
        ratio = (log_probs[i] - old[i]).exp()
        kl = kl + (ratio * (log_probs[i] - log_probs[i].detach()) * mask).sum() / (count * samples)
    assert 0 < sum(float(w.sum()) == 0 for w in weights) < sum(row["reward"] < 0 for row in rows)
    expected = gradients(model, policy_gradient_loss(model, rows, old=old, weights=weights) + 0.5 * kl)
    trainer = start(use_opsm=True, opsm_delta=0.05, use_kl_loss=True, kl_loss_coef=0.5, use_unbiased_kl=True)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 2}):
        metrics, found = gradient_of(trainer, rows, rollout_id=1, **layout)
        assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
        assert 0 < metrics["train/opsm_clipfrac"] < 1
