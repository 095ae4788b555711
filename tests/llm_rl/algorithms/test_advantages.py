"""Advantages, returns, GAE and whitening against plain loops over tokens."""

from __future__ import annotations

import statistics

import pytest
import torch

from llm_rl.algorithms.advantages import (
    broadcast_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    token_rewards,
)
from llm_rl.algorithms.gae import gae
from llm_rl.algorithms.scan import discounted_suffix_sum
from llm_rl.algorithms.segments import Segments
from llm_rl.algorithms.whitening import whiten

SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]


def per_sample(ragged, function, rewards, *tokens):
    """Concatenate `function(reward, trainable values of each tensor)` over samples, 0 at masked tokens."""
    out = []
    for i, m in enumerate(ragged.samples(ragged.mask)):
        values = function(rewards[i].item(), *([v.item() for v in ragged.samples(x)[i][m == 1]] for x in tokens))
        values = iter(values)
        out += [next(values) if on else 0.0 for on in m]
    return torch.tensor(out, dtype=torch.float64)


def test_broadcast(ragged):
    rewards = ragged.randn(per_sample=True)
    expected = per_sample(ragged, lambda r, m: [r] * len(m), rewards, ragged.mask)
    assert torch.equal(broadcast_advantages(rewards, ragged.mask, ragged.segments), expected)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_reinforce_plus_plus(ragged, gamma, kl_coef):
    rewards, kl = ragged.randn(per_sample=True), ragged.randn()

    def loop(reward, kls):
        out, following = [], 0.0
        for t in reversed(range(len(kls))):
            following = -kl_coef * kls[t] + (reward if t == len(kls) - 1 else 0.0) + gamma * following
            out.insert(0, following)
        return out

    got = reinforce_plus_plus_returns(rewards, ragged.mask, ragged.segments, kl=kl, kl_coef=kl_coef, gamma=gamma)
    torch.testing.assert_close(got, per_sample(ragged, loop, rewards, kl), rtol=1e-12, atol=1e-14)


def test_reinforce_plus_plus_baseline(ragged):
    rewards, kl = ragged.randn(per_sample=True), ragged.randn()
    before = kl.clone()
    got = reinforce_plus_plus_baseline_advantages(rewards, ragged.mask, ragged.segments, kl=kl, kl_coef=0.2)
    expected = per_sample(ragged, lambda r, k: [r - 0.2 * x for x in k], rewards, kl)
    torch.testing.assert_close(got, expected)
    assert torch.equal(kl, before)


def test_the_reward_sits_on_the_last_trainable_token():
    s = Segments.of([4, 3, 2])
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0, 0])
    got = token_rewards(torch.tensor([5.0, 6.0, 7.0]), mask, s)
    assert got.tolist() == [0, 5, 0, 0, 0, 0, 6, 0, 0]


def gae_loop(gamma, lam):
    def loop(_, rewards, values):
        out, following, next_value = [], 0.0, 0.0
        for r, v in zip(reversed(rewards), reversed(values), strict=True):
            following = r + gamma * next_value - v + gamma * lam * following
            next_value = v
            out.insert(0, following)
        return out

    return loop


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae(ragged, gamma, lam):
    rewards, values = ragged.randn(), ragged.randn()
    advantages, targets = gae(rewards, values, ragged.mask, ragged.segments, gamma=gamma, lam=lam)
    expected = per_sample(ragged, gae_loop(gamma, lam), torch.zeros(6), rewards, values)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(targets, (expected + values) * ragged.mask)


def test_gae_with_lambda_1_is_the_return_minus_the_value(ragged):
    rewards, values = ragged.randn(per_sample=True), ragged.randn()
    per_token = token_rewards(rewards, ragged.mask, ragged.segments)
    advantages, targets = gae(per_token, values, ragged.mask, ragged.segments)
    torch.testing.assert_close(targets, broadcast_advantages(rewards, ragged.mask, ragged.segments))
    torch.testing.assert_close(advantages, (targets - values) * ragged.mask)


def test_gae_of_long_float32_samples():
    torch.manual_seed(0)
    lengths = [3000, 1, 777, 0, 1500]
    s, n = Segments.of(lengths), sum(lengths)
    rewards, values, mask = torch.randn(n), torch.randn(n), (torch.rand(n) < 0.8).float()
    got, _ = gae(rewards, values, mask, s, gamma=0.999, lam=0.97)
    expected, start = [], 0
    for length in lengths:
        following = next_value = 0.0
        row = [0.0] * length
        for t in reversed(range(length)):
            if mask[start + t]:
                r, v = rewards[start + t].item(), values[start + t].item()
                following = r + 0.999 * next_value - v + 0.999 * 0.97 * following
                next_value, row[t] = v, following
        expected += row
        start += length
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spoil", SPOILS)
def test_masked_tokens_change_nothing(ragged, spoil):
    rewards, kl, values = ragged.randn(per_sample=True), ragged.randn(), ragged.randn()
    results = []
    for k, v in ((kl, values), (ragged.spoiled(kl, spoil), ragged.spoiled(values, spoil))):
        results.append(
            [
                reinforce_plus_plus_returns(rewards, ragged.mask, ragged.segments, kl=k, kl_coef=0.1, gamma=0.9),
                reinforce_plus_plus_baseline_advantages(rewards, ragged.mask, ragged.segments, kl=k, kl_coef=0.1),
                *gae(k, v, ragged.mask, ragged.segments, gamma=0.9, lam=0.9),
                whiten(v, ragged.mask),
            ]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert (a[ragged.mask == 0] == 0).all()


def test_one_samples_nan_stays_in_that_sample(ragged):
    rewards, values = ragged.randn(), ragged.randn()
    rewards[17] = float("nan")  # trainable, in the last sample
    got, _ = gae(rewards, values, ragged.mask, ragged.segments, gamma=0.9, lam=0.9)
    assert got[17].isnan()
    assert got[:14].isfinite().all()


def test_nothing_to_estimate():
    for lengths in ([], [0], [3]):
        s, zeros = Segments.of(lengths), torch.zeros(sum(lengths))
        advantages, targets = gae(zeros, zeros, zeros, s)
        returns = reinforce_plus_plus_returns(torch.ones(len(lengths)), zeros, s)
        for x in (advantages, targets, returns, broadcast_advantages(torch.ones(len(lengths)), zeros, s)):
            assert torch.equal(x, zeros)


def test_discounts_out_of_range(ragged):
    x = ragged.randn()
    with pytest.raises(ValueError, match="between 0 and 1"):
        discounted_suffix_sum(x, ragged.mask, ragged.segments, 1.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        gae(x, x, ragged.mask, ragged.segments, lam=-0.1)


def test_whitening(ragged):
    x = ragged.randn() * 3 + 5
    chosen = x[ragged.mask == 1].tolist()
    mean, std = statistics.fmean(chosen), (statistics.variance(chosen) + 1e-8) ** 0.5
    got = whiten(x, ragged.mask)
    expected = [(v - mean) / std if m else 0.0 for v, m in zip(x.tolist(), ragged.mask.tolist(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    kept = whiten(x, ragged.mask, shift_mean=False)
    torch.testing.assert_close(kept[ragged.mask == 1], got[ragged.mask == 1] + mean)


@pytest.mark.parametrize("cuts", [[19], [10, 9], [0, 5, 14, 0], [1] * 19])
def test_whitening_over_ranks_equals_whitening_of_all(ragged, cuts):
    """Ranks are simulated as threads that meet in every reduction."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    x = ragged.randn() * 1e3 + 1e6
    barrier, box = Barrier(len(cuts)), [None] * len(cuts)

    def rank(i, values, mask):
        def all_reduce_sum(t):
            box[i] = t
            barrier.wait()
            total = torch.stack(list(box)).sum(0)
            barrier.wait()
            return total

        return whiten(values, mask, all_reduce_sum=all_reduce_sum)

    with ThreadPoolExecutor(len(cuts)) as pool:
        parts = list(pool.map(rank, range(len(cuts)), x.split(cuts), ragged.mask.split(cuts)))
    torch.testing.assert_close(torch.cat(parts), whiten(x, ragged.mask), rtol=1e-9, atol=1e-12)


def test_whitening_edge_cases():
    with pytest.raises(ValueError, match="every rank"):
        whiten(torch.ones(3), torch.zeros(3))
    assert whiten(torch.tensor([2.0, 9.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert (whiten(torch.full((4,), 0.9), torch.ones(4)).abs() < 1e-6).all()
    assert whiten(torch.randn(4), torch.ones(4)).dtype == torch.float32
