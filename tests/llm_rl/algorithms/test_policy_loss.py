"""Policy losses against loops over tokens in float64, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch

from llm_rl.algorithms.policy_loss import (
    cispo_loss,
    clipped_policy_loss,
    opsm_keep,
    sequence_log_ratio,
    token_log_ratio,
)
from llm_rl.algorithms.reduction import masked_sum, token_weights

SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]
CLIPS = [
    {"eps_clip": 0.2},
    {"eps_clip": 0.2, "eps_clip_high": 0.28},
    {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 3.0},
]


def clipped_by_hand(log_ratio, advantage, eps_clip, eps_clip_high=None, eps_clip_c=None):
    """One token, as torch scalars, so that autograd gives the gradient."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = torch.exp(min(max(log_ratio, torch.tensor(-20.0)), torch.tensor(20.0)))
    inside = 1 - eps_clip <= ratio <= 1 + high
    bounded = ratio if inside else torch.tensor(1 - eps_clip if ratio < 1 else 1 + high, dtype=torch.float64)
    loss = -ratio * advantage
    if -bounded * advantage > loss:
        loss = -bounded * advantage
    if eps_clip_c is not None and advantage < 0 and loss > -eps_clip_c * advantage:
        loss = -eps_clip_c * advantage
    return loss + 0 * log_ratio


def draw(ragged, scale=0.6):
    old = ragged.log_probs(2.0)
    new = (old + ragged.randn(scale)).requires_grad_()
    return new, old, ragged.randn()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipped_loss(ragged, clip, level):
    new, old, advantages = draw(ragged)
    rows = zip(*(ragged.samples(x) for x in (new, old, advantages, ragged.mask)), strict=True)
    expected = []
    for n, o, a, m in rows:
        mean = sum((n - o) * m) / max(int(m.sum()), 1)
        for t in range(len(n)):
            log_ratio = mean if level == "sequence" else n[t] - o[t]
            expected.append(clipped_by_hand(log_ratio, a[t], **clip) if m[t] else n[t] * 0)
    expected = torch.stack(expected)
    log_ratio = (
        token_log_ratio(new, old, ragged.mask)
        if level == "token"
        else sequence_log_ratio(new, old, ragged.mask, ragged.segments)
    )
    got = clipped_policy_loss(log_ratio, advantages, ragged.mask, **clip)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-13)
    weights = ragged.randn()
    grads = [torch.autograd.grad((x * weights).sum(), new)[0] for x in (got.loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_clip_indicators():
    # ratio, advantage -> clipped?, dual?
    cases = [
        (1.5, 1.0, 1, 0),
        (1.5, -1.0, 0, 0),
        (0.5, 1.0, 0, 0),
        (0.5, -1.0, 1, 0),
        (1.1, 1.0, 0, 0),
        (5.0, -1.0, 0, 1),
        (5.0, 0.0, 0, 0),
    ]
    ratio, advantage, clipped, dual = map(torch.tensor, zip(*cases, strict=True))
    mask = torch.ones(len(cases))
    got = clipped_policy_loss(ratio.double().log(), advantage.double(), mask, eps_clip=0.2, eps_clip_c=3.0)
    assert got.clipped.tolist() == clipped.tolist()
    assert got.dual_clipped.tolist() == dual.tolist()
    torch.testing.assert_close(got.ratio, ratio.double())
    assert got.loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -1.1, 3.0, 0.0])


def test_gradient_by_finite_differences(ragged):
    new, old, advantages = draw(ragged, scale=0.1)
    keep = {"eps_clip": 0.3, "eps_clip_c": 2.0}

    def gspo(n):
        log_ratio = sequence_log_ratio(n, old, ragged.mask, ragged.segments)
        return clipped_policy_loss(log_ratio, advantages, ragged.mask, **keep).loss

    def ppo(n):
        return clipped_policy_loss(token_log_ratio(n, old, ragged.mask), advantages, ragged.mask, **keep).loss

    assert torch.autograd.gradcheck(gspo, (new,))
    assert torch.autograd.gradcheck(ppo, (new,))


def test_on_policy_the_gradient_is_reinforce(ragged):
    new = ragged.log_probs(grad=True)
    advantages = ragged.randn()
    got = clipped_policy_loss(token_log_ratio(new, new, ragged.mask), advantages, ragged.mask)
    (grad,) = torch.autograd.grad(got.loss.sum(), new)
    torch.testing.assert_close(grad, -advantages * ragged.mask)
    assert (got.ratio == 1).all()
    assert (got.clipped == 0).all()


def test_off_policy_the_ratio_is_not_one(ragged):
    new, old, advantages = draw(ragged)
    got = clipped_policy_loss(token_log_ratio(new, old, ragged.mask), advantages, ragged.mask)
    chosen = ragged.mask == 1
    assert (got.ratio[chosen] != 1).all()
    torch.testing.assert_close(got.ratio[chosen], (new - old)[chosen].exp().detach())


def test_gspo_has_one_ratio_a_sequence_and_lengths_are_its_own(ragged):
    new, old, _ = draw(ragged)
    log_ratio = sequence_log_ratio(new, old, ragged.mask, ragged.segments)
    for values, mask in zip(ragged.samples(log_ratio), ragged.samples(ragged.mask), strict=True):
        assert values[mask == 1].unique().numel() <= 1
        assert (values[mask == 0] == 0).all()


def test_gspo_per_sample_is_the_papers_sequence_objective(ragged):
    new, old, _ = draw(ragged)
    rewards = ragged.randn(per_sample=True)
    advantages = ragged.segments.expand(rewards)
    log_ratio = sequence_log_ratio(new, old, ragged.mask, ragged.segments)
    loss = clipped_policy_loss(log_ratio, advantages, ragged.mask, eps_clip=0.1).loss
    weights = token_weights(
        ragged.mask,
        ragged.segments,
        per_token=False,
        global_num_samples=6,
        global_num_tokens=11,
        dtype=torch.float64,
    )
    got = masked_sum(loss, weights)
    expected = torch.zeros((), dtype=torch.float64)
    rows = zip(*(ragged.samples(x) for x in (new, old, ragged.mask)), rewards, strict=True)
    for n, o, m, a in rows:
        if m.any():
            ratio = (n[m == 1].mean() - o[m == 1].mean()).exp()
            expected = expected - torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a) / 6
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(x, new)[0] for x in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("clip", [{"eps_clip": 0.2}, {"eps_clip": 1.0, "eps_clip_high": 4.0}])
def test_cispo(ragged, clip):
    new, old, advantages = draw(ragged)
    got = cispo_loss(new, token_log_ratio(new, old, ragged.mask), advantages, ragged.mask, **clip)
    low, high = 1 - clip["eps_clip"], 1 + clip.get("eps_clip_high", clip["eps_clip"])
    for t in range(len(new)):
        ratio = math.exp(new[t].item() - old[t].item())
        weight = min(max(ratio, low), high) * ragged.mask[t].item()
        assert got.loss[t].item() == pytest.approx(-weight * advantages[t].item() * new[t].item(), abs=1e-12)
        (grad,) = torch.autograd.grad(got.loss[t], new, retain_graph=True)
        assert grad[t].item() == pytest.approx(-weight * advantages[t].item(), abs=1e-12)
        assert got.clipped[t].item() == (ragged.mask[t].item() and not low <= ratio <= high)


def test_opsm(ragged):
    new, old, advantages = draw(ragged, scale=1.0)
    delta = 0.05
    keep = opsm_keep(new, old, advantages, ragged.mask, ragged.segments, delta=delta)
    expected = []
    for n, o, a, m in zip(*(ragged.samples(x) for x in (new, old, advantages, ragged.mask)), strict=True):
        drift = ((o - n) * m).sum().item() / max(int(m.sum()), 1)
        expected += [0.0 if mi and ai < 0 and drift > delta else 1.0 for ai, mi in zip(a, m, strict=True)]
    assert keep.tolist() == expected
    assert 0 < expected.count(0.0) < len(expected)
    assert not keep.requires_grad
    assert opsm_keep(new, old, advantages, ragged.mask, ragged.segments, delta=1e9).all()


@pytest.mark.parametrize("spoil", SPOILS)
def test_masked_tokens_change_nothing(ragged, spoil):
    clean = draw(ragged)
    dirty = tuple(ragged.spoiled(x, spoil) for x in clean)
    results = []
    for new, old, advantages in (clean, dirty):
        token = token_log_ratio(new, old, ragged.mask)
        sequence = sequence_log_ratio(new, old, ragged.mask, ragged.segments)
        losses = [
            clipped_policy_loss(token, advantages, ragged.mask, eps_clip_c=3.0),
            clipped_policy_loss(sequence, advantages, ragged.mask),
            cispo_loss(new, token, advantages, ragged.mask),
        ]
        keep = opsm_keep(new, old, advantages, ragged.mask, ragged.segments, delta=0.0)
        (grad,) = torch.autograd.grad(sum(x.loss.sum() for x in losses), new)
        parts = [part for x in losses for part in (x.loss, x.clipped, x.dual_clipped)]
        results.append([*parts, keep, grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert (a[ragged.mask == 0] == 0).all() or a is results[0][-2]


@pytest.mark.parametrize("gap", [1e3, -1e3, float("inf"), -float("inf")])
def test_extreme_ratios_of_trainable_tokens_are_clamped(gap):
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - gap, -2.0], dtype=torch.float64)
    mask, advantages = torch.ones(2), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    got = clipped_policy_loss(token_log_ratio(new, old, mask), advantages, mask)
    got.loss.sum().backward()
    assert got.ratio[0].item() == pytest.approx(math.exp(math.copysign(20, gap)))
    assert new.grad.isfinite().all()
    assert new.grad[0] == 0


def test_old_log_probs_and_advantages_get_no_gradient(ragged):
    new, old, advantages = draw(ragged)
    old.requires_grad_()
    advantages.requires_grad_()
    log_ratio = token_log_ratio(new, old, ragged.mask)
    loss = clipped_policy_loss(log_ratio, advantages, ragged.mask).loss.sum()
    (loss + cispo_loss(new, log_ratio, advantages, ragged.mask).loss.sum()).backward()
    assert old.grad is None
    assert advantages.grad is None


def test_refusals():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="greater than 1"):
        clipped_policy_loss(x, x, x, eps_clip_c=1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        clipped_policy_loss(x, x, x, eps_clip=-0.1)
    with pytest.raises(ValueError, match="must not be negative"):
        cispo_loss(x, x, x, x, eps_clip_high=-0.1)
