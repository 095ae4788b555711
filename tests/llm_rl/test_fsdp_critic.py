"""PPO with a critic: values, advantages and both gradients against plain float64 loops over sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, full_weights, make_rows, make_trainer, plan, row_values
from fsdp_reference import assert_same_gradients, gradients, plain_model, policy_gradient_loss
from transformers import AutoModelForTokenClassification

from llm_rl.trainers.fsdp.attention import PACKED

GAMMA, LAMBDA = 0.97, 0.9


@pytest.fixture
def start(tiny_model_dir, tiny_critic_dir):
    started = []

    def build(**changes):
        settings = {"advantage_estimator": "ppo", "critic_load": tiny_critic_dir, "gamma": GAMMA, "lambd": LAMBDA}
        started.append(make_trainer(tiny_model_dir, **(settings | changes)))
        return started[-1]

    yield build
    for trainer in started:
        trainer.shutdown()


def plain_critic(directory):
    model = AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    return model.eval()


def plain_gae(row: dict, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns by walking back over the trainable tokens."""
    advantages, returns = np.zeros(row["response_length"]), np.zeros(row["response_length"])
    following = advantage = 0.0
    reward = row["reward"]  # paid at the last trainable token
    for t in reversed(np.flatnonzero(row["loss_mask"])):
        delta = reward + GAMMA * following - float(values[t])
        advantage = delta + GAMMA * LAMBDA * advantage
        advantages[t], returns[t] = advantage, advantage + float(values[t])
        following, reward = float(values[t]), 0.0
    return advantages, returns


def plain_value_loss(critic, rows, old, targets, *, clip: float) -> torch.Tensor:
    """The mean over samples of each one's mean clipped squared error."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, before, target in zip(rows, old, targets, strict=True):
        values = row_values(critic, row)
        for t in np.flatnonzero(row["loss_mask"]):
            bounded = before[t] + (values[t] - before[t]).clamp(-clip, clip)
            error = torch.maximum((values[t] - target[t]) ** 2, (bounded - target[t]) ** 2)
            loss = loss + error / float(row["loss_mask"].sum()) / len(rows)
    return loss


def whitened(advantages: list[np.ndarray], rows: list[dict]) -> list[np.ndarray]:
    chosen = np.concatenate([a[row["loss_mask"] != 0] for a, row in zip(advantages, rows, strict=True)])
    return [(a - chosen.mean()) / chosen.std(ddof=1) for a in advantages]


@pytest.mark.parametrize("attention", [PACKED, "sdpa"])
def test_both_gradients_equal_plain_sequences(start, tiny_model_dir, tiny_critic_dir, attention):
    """At ragged lengths with masked tokens and a sample without any trainable one, however the batch is cut up."""
    rows = make_rows(20)
    rows[4]["loss_mask"][:] = 0
    critic, policy = plain_critic(tiny_critic_dir), plain_model(tiny_model_dir, torch.float64)
    old = [row_values(critic, row).detach() for row in rows]
    found = [plain_gae(row, values) for row, values in zip(rows, old, strict=True)]
    targets = [returns for _, returns in found]
    value = plain_value_loss(critic, rows, old, targets, clip=0.2)
    expected = {f"critic.{name}": gradient for name, gradient in gradients(critic, value).items()}
    advantages = whitened([advantages for advantages, _ in found], rows)
    expected |= gradients(policy, policy_gradient_loss(policy, rows, temperature=0.7, advantages=advantages))
    masks = np.concatenate([row["loss_mask"] for row in rows]) != 0
    returns, errors = np.concatenate(targets)[masks], np.concatenate(targets)[masks] - torch.cat(old).numpy()[masks]

    trainer = start(clip_grad=0.0, attn_implementation=attention, normalize_advantages=True, rollout_temperature=0.7)
    seen = capture_gradients(trainer)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 3}):
        metrics = trainer.train(0, plan(rows, **layout)[0])
        for part in ("", "critic."):
            mine = {k: v for k, v in seen.items() if k.startswith("critic.") == bool(part)}
            its = {k: v for k, v in expected.items() if k.startswith("critic.") == bool(part)}
            assert_same_gradients(mine, its, rtol=0, atol=3e-6)
        assert metrics["train/value_loss"] == pytest.approx(value.item(), rel=1e-5)
        assert metrics["train/value_explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-5)
        norm = np.sqrt(sum(float(g.square().sum()) for k, g in expected.items() if k.startswith("critic.")))
        assert metrics["train/critic_grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_two_steps_clip_against_the_values_of_before_the_first(start, tiny_critic_dir):
    """Returns and old values stay those of before both steps; the critic has a learning rate of its own."""
    rows = make_rows(21, groups=4)
    trainer = start(optimizer="sgd", lr=0.0, critic_lr=0.002, clip_grad=0.0, value_clip=0.01)
    metrics = trainer.train(0, plan(rows, num_steps=2)[0])
    critic = plain_critic(tiny_critic_dir)
    old = [row_values(critic, row).detach() for row in rows]
    targets = [plain_gae(row, values)[1] for row, values in zip(rows, old, strict=True)]
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.002)
    losses = []
    for part in (slice(0, 8), slice(8, 16)):
        optimizer.zero_grad()
        loss = plain_value_loss(critic, rows[part], old[part], targets[part], clip=0.01)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for name, weight in critic.named_parameters():
        mine = dict(trainer.critic.model.named_parameters())[name].full_tensor()
        torch.testing.assert_close(mine.double(), weight, rtol=0, atol=1e-6, msg=name)
    assert metrics["train/value_loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert metrics["train/value_clipfrac"] > 0.1
    assert metrics["train/critic_lr"] == 0.002


def test_the_policy_waits_for_the_critic(start):
    trainer = start(num_critic_only_steps=2, critic_lr_warmup_iters=2)
    before, policy, rates = full_weights(trainer), [], []
    for i in range(3):
        metrics = trainer.train(i, plan(make_rows(22, version=i))[0])
        policy.append(max(float((w - before[n]).abs().max()) for n, w in full_weights(trainer).items()))
        rates.append(metrics["train/critic_lr"])
        assert ("train/pg_loss" in metrics) == (i >= 2)
    assert policy[:2] == [0, 0]
    assert policy[2] > 0
    assert rates == [0, pytest.approx(5e-4), pytest.approx(1e-3)]


def test_a_missing_head_starts_at_zero(start, tiny_model_dir):
    trainer = start(critic_load=None, critic_lr=1e-3)
    assert trainer.settings.hf_checkpoint == tiny_model_dir
    rows = make_rows(23)
    explained = [trainer.train(0, plan(rows)[0])["train/value_explained_variance"] for _ in range(8)]
    assert explained[0] == 0
    assert explained[-1] > 0.2  # it learns the returns of these rows


def test_resumed_training_gives_the_same_numbers(start, tmp_path):
    schedule = {"lr_decay_style": "linear", "lr_decay_iters": 4, "num_critic_only_steps": 1, "critic_lr": 3e-3}
    rollouts = [plan(make_rows(24 + i, version=i), num_steps=2)[0] for i in range(3)]
    whole = start(**schedule)
    for i in range(2):
        whole.train(i, rollouts[i])
    whole.save(tmp_path)
    expected = whole.train(2, rollouts[2])
    resumed = start(**schedule)
    resumed.load(tmp_path)
    assert resumed.train(2, rollouts[2]) == expected
    for mine, its in ((resumed.model, whole.model), (resumed.critic.model, whole.critic.model)):
        for (name, a), (_, b) in zip(mine.named_parameters(), its.named_parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=0, atol=0, msg=name)
