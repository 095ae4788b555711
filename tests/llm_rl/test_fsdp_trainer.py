"""Gradients, metrics and updates of a single-rank trainer against plain loops over sequences."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, full_weights, make_rows, make_trainer, plan, row_log_probs
from fsdp_reference import assert_same_gradients, gradients, plain_model, policy_gradient_loss

from llm_rl.trainers.fsdp.attention import PACKED

# Relative to the largest entry of the gradient. transformers normalises and rotates in float32 even in a float64 model,
# so float64 isn't tighter; the kernel and the losses are compared in true float64 in tests of their own.
TOLERANCE = 3e-6


@pytest.fixture
def start(tiny_model_dir):
    """Start trainers on the tiny model; they are shut down at the end."""
    started = []

    def build(**changes):
        started.append(make_trainer(tiny_model_dir, **changes))
        return started[-1]

    yield build
    for trainer in started:
        trainer.shutdown()


def gradient_of(trainer, rows, *, rollout_id=0, **layout):
    """Metrics and gradient of one optimizer step that isn't taken."""
    seen = capture_gradients(trainer)
    metrics = trainer.train(rollout_id, plan(rows, **layout)[0])
    return metrics, dict(seen)


@pytest.mark.parametrize(
    ("dtype", "attention", "per_token"),
    [("fp32", PACKED, False), ("fp64", PACKED, True), ("fp32", "sdpa", True), ("fp64", "eager", False)],
)
def test_gradient_equals_plain_sequences(start, tiny_model_dir, dtype, attention, per_token):
    rows = make_rows(0)
    trainer = start(
        train_dtype=dtype,
        attn_implementation=attention,
        calculate_per_token_loss=per_token,
        rollout_temperature=0.7,
        clip_grad=0.0,
    )
    metrics, found = gradient_of(trainer, rows)
    model = plain_model(tiny_model_dir, torch.float64)
    loss = policy_gradient_loss(model, rows, per_token=per_token, temperature=0.7)
    expected = gradients(model, loss)
    assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["train/pg_clipfrac"] == 0
    assert metrics["train/ppo_kl"] == 0
    tokens = [
        abs(float(lp) - float(r))
        for row in rows
        for lp, r, m in zip(row_log_probs(model, row, 0.7), row["rollout_log_probs"], row["loss_mask"], strict=True)
        if m
    ]
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(np.mean(tokens), abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_micro_batches_do_not_matter(start, per_token):
    """Micro-batches of 1, 3 and 8 rows, and token budgets: one gradient, and the token count divides once."""
    rows = make_rows(1)
    options = {"calculate_per_token_loss": per_token, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    trainer = start(clip_grad=0.0, **options)
    whole_metrics, whole = gradient_of(trainer, rows)
    for layout in (
        {"max_tokens_per_gpu": None, "micro_batch_size": 1},
        {"max_tokens_per_gpu": None, "micro_batch_size": 3},
        {"max_tokens_per_gpu": None, "micro_batch_size": 8},
        {"max_tokens_per_gpu": 30},
        {"max_tokens_per_gpu": 60, "balance_data": True},
    ):
        metrics, found = gradient_of(trainer, rows, **layout)
        assert_same_gradients(found, whole, rtol=0, atol=TOLERANCE)
        assert metrics == pytest.approx(whole_metrics, abs=1e-6)


def test_a_rollout_in_several_rows_counts_once(start, tiny_model_dir):
    rows = make_rows(2, groups=2, group_size=3)
    for row, sample in zip(rows, [0, 0, 1, 2, 2, 2], strict=True):
        row["sample_index"] = sample
    trainer = start(clip_grad=0.0)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 1}):
        _, found = gradient_of(trainer, rows, **layout)
        model = plain_model(tiny_model_dir, torch.float64)
        assert_same_gradients(found, gradients(model, policy_gradient_loss(model, rows)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_masked_tokens_never_matter(start, spoil):
    rows = make_rows(3)
    trainer = start(clip_grad=0.0, use_rollout_logprobs=True, advantage_estimator="gspo")
    expected_metrics, expected = gradient_of(trainer, rows)
    spoiled = copy.deepcopy(rows)
    for row in spoiled:
        row["rollout_log_probs"][row["loss_mask"] == 0] = spoil
    metrics, found = gradient_of(trainer, spoiled)
    assert_same_gradients(found, expected, rtol=0, atol=0)
    assert metrics == expected_metrics


def test_nothing_trainable_gives_zero(start):
    rows = make_rows(4, groups=1)
    for row in rows:
        row["loss_mask"][:] = 0
    for per_token in (False, True):
        trainer = start(calculate_per_token_loss=per_token)
        before = full_weights(trainer)
        metrics = trainer.train(0, plan(rows)[0])
        assert metrics["train/loss"] == 0
        assert metrics["train/grad_norm"] == 0
        for name, weight in full_weights(trainer).items():
            torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_stale_rows_take_the_behaviour_policy(start, tiny_model_dir):
    """One step: fresh rows have ratio 1, rows of older weights the ratio to the engine's log-probs."""
    rows = make_rows(5, version=3)
    for row in rows[::2]:
        row["weight_version"] = 2
    trainer = start(clip_grad=0.0)
    metrics, found = gradient_of(trainer, rows, rollout_id=3)
    model = plain_model(tiny_model_dir, torch.float64)
    old = {i: torch.as_tensor(rows[i]["rollout_log_probs"]).double() for i in range(0, len(rows), 2)}
    expected = gradients(model, policy_gradient_loss(model, rows, old=old))
    assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
    assert metrics["train/pg_clipfrac"] > 0
    fresh = gradients(model, policy_gradient_loss(model, rows))
    assert max(float((fresh[n] - expected[n]).abs().max()) for n in fresh) > 1e-4  # it makes a difference

    del rows[0]["rollout_log_probs"]
    with pytest.raises(ValueError, match="sample 0 was drawn by weights of version 2, now is 3"):
        trainer.train(3, plan(rows)[0])


def test_use_rollout_logprobs(start, tiny_model_dir):
    rows = make_rows(6)
    trainer = start(clip_grad=0.0, use_rollout_logprobs=True)
    metrics, found = gradient_of(trainer, rows)
    model = plain_model(tiny_model_dir, torch.float64)
    old = {i: torch.as_tensor(row["rollout_log_probs"]).double() for i, row in enumerate(rows)}
    assert_same_gradients(found, gradients(model, policy_gradient_loss(model, rows, old=old)), rtol=0, atol=TOLERANCE)
    tokens = [
        (old[i][t] - row_log_probs(model, row)[t]).item() / row["loss_mask"].sum() / len(rows)
        for i, row in enumerate(rows)
        for t in np.flatnonzero(row["loss_mask"])
    ]
    assert metrics["train/ppo_kl"] == pytest.approx(sum(tokens), abs=1e-6)


def test_two_steps_keep_the_old_policy_of_before_the_first(start, tiny_model_dir):
    """Weights after two steps equal those of a plain loop whose ratios refer to the weights before both."""
    rows = make_rows(7, groups=4)
    decay = {"lr_decay_style": "linear", "lr_decay_iters": 3}
    trainer = start(optimizer="sgd", lr=0.3, clip_grad=0.5, **decay)
    metrics = trainer.train(0, plan(rows, num_steps=2)[0])
    model = plain_model(tiny_model_dir, torch.float64)
    old = {i: row_log_probs(model, row).detach() for i, row in enumerate(rows)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    norms = []
    for step, lr in ((0, 0.3), (1, 0.2)):
        part = range(step * 8, step * 8 + 8)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = policy_gradient_loss(model, [rows[i] for i in part], old={k: old[i] for k, i in enumerate(part)})
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(full_weights(trainer)[name].double(), weight.detach(), rtol=0, atol=1e-6, msg=name)
    assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert metrics["train/lr"] == pytest.approx(0.25)


def test_kl_and_entropy_terms(start, tiny_model_dir, tmp_path):
    """Loss and gradient with a reference of other weights, k1 and k3, and an entropy bonus."""
    reference = plain_model(tiny_model_dir, torch.float64)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    reference.to(torch.float32).save_pretrained(tmp_path)
    reference.double()
    rows = make_rows(8, groups=2)
    values = {}
    for kind in ("k1", "k3"):
        trainer = start(
            clip_grad=0.0,
            ref_load=tmp_path,
            use_kl_loss=True,
            kl_loss_coef=0.3,
            kl_loss_type=kind,
            entropy_coef=0.05,
        )
        metrics, found = gradient_of(trainer, rows)
        model = plain_model(tiny_model_dir, torch.float64)
        kl = entropy = torch.zeros((), dtype=torch.float64)
        for row in rows:
            x = row_log_probs(model, row) - row_log_probs(reference, row).detach()
            value = x if kind == "k1" else torch.exp(-x) - 1 + x
            logits = model(input_ids=torch.as_tensor(row["tokens"])[None]).logits[0]
            first = len(row["tokens"]) - row["response_length"] - 1
            p = logits[first : first + row["response_length"]].softmax(-1)
            weight = torch.as_tensor(row["loss_mask"]).double() / float(row["loss_mask"].sum()) / len(rows)
            kl = kl + (value * weight).sum()
            entropy = entropy + (-(p * p.log()).sum(-1) * weight).sum()
        loss = policy_gradient_loss(model, rows) + 0.3 * kl - 0.05 * entropy
        assert_same_gradients(found, gradients(model, loss), rtol=0, atol=TOLERANCE)
        assert metrics["train/kl_loss"] == pytest.approx(float(kl), abs=1e-5)
        assert metrics["train/entropy_loss"] == pytest.approx(float(entropy), abs=1e-5)
        assert metrics["train/loss"] == pytest.approx(float(loss), abs=1e-5)
        values[kind] = metrics["train/kl_loss"]
    assert abs(values["k1"] - values["k3"]) > 1e-3


def test_a_constant_divisor_weighs_every_token_alike(start, tiny_model_dir):
    """Dr. GRPO: the sum over a sample's tokens is divided by the same number in short and in long samples."""
    rows = make_rows(4)
    model = plain_model(tiny_model_dir, torch.float64)
    lengths = [torch.full((row["response_length"],), row["loss_mask"].sum() / 12.0) for row in rows]
    assert len({int(row["loss_mask"].sum()) for row in rows}) > 2
    expected = gradients(model, policy_gradient_loss(model, rows, weights=lengths))
    trainer = start(loss_length_divisor=12.0, clip_grad=0.0)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 1}):
        _, found = gradient_of(trainer, rows, **layout)
        assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)


def test_the_reference_follows_every_so_many_rollouts(start, tmp_path):
    """Far from the policy until it is renewed, then the policy itself; a checkpoint keeps it as it is."""
    settings = {"use_kl_loss": True, "kl_loss_type": "k3", "ref_update_interval": 2, "lr": 1e-2}
    trainer = start(**settings)

    def kl(of, rollout_id):
        return of.train(rollout_id, plan(make_rows(rollout_id, version=rollout_id))[0])["train/kl_loss"]

    assert kl(trainer, 0) == 0
    assert kl(trainer, 1) > 1e-3
    renewed = full_weights(trainer)
    assert kl(trainer, 2) == 0  # it became the policy after rollout 1
    moved = full_weights(trainer)
    assert any((moved[name] != weight).any() for name, weight in renewed.items())
    trainer.save(tmp_path)
    for name, tensor in trainer.extra_state()["reference"].items():
        torch.testing.assert_close(tensor.full_tensor(), renewed[name], rtol=0, atol=0)
    expected = kl(trainer, 3)
    assert expected > 1e-3
    resumed = start(**settings)
    resumed.load(tmp_path)
    assert kl(resumed, 3) == pytest.approx(expected, rel=1e-6)


def test_observed_entropy_costs_no_gradient(start):
    rows = make_rows(9, groups=1)
    _, plain = gradient_of(start(clip_grad=0.0), rows)
    metrics, observed = gradient_of(start(clip_grad=0.0, observe_training_entropy=True), rows)
    assert_same_gradients(observed, plain, rtol=0, atol=TOLERANCE)
    assert 2.0 < metrics["train/entropy_loss"] <= math.log(15)


def test_gradient_that_is_not_finite_stops_before_the_weights(start):
    rows = make_rows(10)
    rows[3]["reward"] = math.inf
    trainer = start()
    before = full_weights(trainer)
    steps = plan(rows, num_steps=3)[0]
    with pytest.raises(FloatingPointError, match="optimizer step 0 of rollout 7: the gradient norm is nan"):
        trainer.train(7, plan(rows)[0])
    for name, weight in full_weights(trainer).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    unchecked = start(check_for_nan_in_loss_and_grad=False)
    assert math.isnan(unchecked.train(0, steps)["train/grad_norm"])


def test_checkpointed_activations_give_the_same_gradient(start):
    rows = make_rows(11)
    for attention in (PACKED, "sdpa"):
        _, plain = gradient_of(start(clip_grad=0.0, attn_implementation=attention), rows)
        checkpointed = start(clip_grad=0.0, gradient_checkpointing=True, attn_implementation=attention)
        assert checkpointed.model.is_gradient_checkpointing
        _, found = gradient_of(checkpointed, rows)
        assert_same_gradients(found, plain, rtol=0, atol=TOLERANCE)


def test_bf16_compute_keeps_an_fp32_master(start):
    rows = make_rows(12)
    trainer = start(train_dtype="bf16", lr=1e-6, clip_grad=0.0)
    before = full_weights(trainer)
    assert all(p.dtype == torch.float32 for p in before.values())
    _, wide = gradient_of(start(clip_grad=0.0), rows)
    for _ in range(3):
        trainer.train(0, plan(rows)[0])
    for name, weight in full_weights(trainer).items():
        moved = (weight - before[name]).abs().max()
        assert 0 < moved < 1e-5, name  # steps far below a bf16 rounding of the weights add up
    _, narrow = gradient_of(trainer, rows)
    scale = max(float(g.abs().max()) for g in wide.values())
    assert all(g.dtype == torch.float32 for g in narrow.values())
    for name, gradient in wide.items():
        torch.testing.assert_close(narrow[name], gradient, rtol=0, atol=0.05 * scale, msg=name)
    narrow_master = start(train_dtype="bf16", keep_fp32_master=False)
    assert {p.dtype for p in narrow_master.model.parameters()} == {torch.bfloat16}


def test_deterministic_mode_repeats_bit_for_bit(start):
    try:
        runs = []
        for _ in range(2):
            trainer = start(deterministic_mode=True)
            metrics = [trainer.train(i, plan(make_rows(i, version=i))[0]) for i in range(3)]
            runs.append((metrics, full_weights(trainer)))
        assert runs[0][0] == runs[1][0]
        for name, weight in runs[0][1].items():
            torch.testing.assert_close(weight, runs[1][1][name], rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_sleeping_trainer_refuses_work(start):
    trainer = start()
    trainer.sleep()
    for action in (lambda: trainer.train(0, plan(make_rows())[0]), lambda: trainer.export_bucket((), 0)):
        with pytest.raises(RuntimeError, match="call wake_up before"):
            action()
    trainer.wake_up()
    assert trainer.train(0, plan(make_rows())[0])["train/grad_norm"] > 0


def test_custom_loss_and_reducer(start, tiny_model_dir):
    rows = make_rows(13)

    def loss(args, batch, logits, reduce):
        chosen = torch.log_softmax(logits.double(), -1).gather(-1, batch.targets[:, None])[:, 0]
        value = reduce(-chosen * batch.segments.expand(batch.rewards))
        return value, {"mine": value}

    trainer = start(clip_grad=0.0, loss_type="custom_loss", custom_loss=loss)
    layout = {"max_tokens_per_gpu": None, "micro_batch_size": 5}
    metrics, found = gradient_of(trainer, rows, **layout)
    model = plain_model(tiny_model_dir, torch.float64)
    expected = gradients(model, policy_gradient_loss(model, rows))  # ratio 1: the same gradient
    assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
    assert metrics["train/mine"] == metrics["train/loss"]

    def dr_grpo(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        assert [len(m) for m in loss_masks] == response_lengths
        mask = torch.cat(loss_masks)
        return lambda values: (values * mask).sum() / 10

    trainer = start(clip_grad=0.0, pg_loss_reducer=dr_grpo)
    _, found = gradient_of(trainer, rows, **layout)
    terms = [(row_log_probs(model, r) * torch.as_tensor(r["loss_mask"])).sum() * -r["reward"] / 10 for r in rows]
    assert_same_gradients(found, gradients(model, sum(terms) / len(rows)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 99}, "sample 2: a response of 99 tokens in a row of"),
        ({"loss_mask": np.ones(50)}, "sample 2: 50 entries in the loss mask"),
        ({"rollout_log_probs": np.ones(50)}, "sample 2: .* and 50 rollout log-probs"),
    ],
)
def test_rows_that_do_not_fit_are_named(start, change, message):
    rows = make_rows(14)
    steps = plan(rows)[0]
    steps[0].rows[2].update(change)
    with pytest.raises(ValueError, match=message):
        start().train(0, steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "custom_loss"}, "custom loss function go together"),
        ({"kl_loss_coef": 0.1}, "no effect without use_kl_loss"),
        ({"kl_coef": 0.1}, "REINFORCE"),
        ({"train_dtype": "fp16"}, "loss scaling"),
        ({"train_dtype": "fp33"}, "unknown dtype"),
        ({"train_dtype": "int8"}, "floating-point"),
        ({"lr_decay_style": "cosine"}, "needs lr_decay_iters"),
        ({"rollout_temperature": 0.0}, "above 0"),
    ],
)
def test_settings_that_can_not_work(tiny_model_dir, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model_dir, **settings)
