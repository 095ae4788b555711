from __future__ import annotations

import pytest
import torch

from llm_rl.algorithms.metrics import effective_sample_size, log_prob_abs_diff, ppo_kl


def test_ess_limits():
    ones = torch.ones(4)
    assert effective_sample_size(torch.full((4,), 0.3), ones).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([0.0, 5.0, 0.0, 0.0]), ones).item() == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)).item() == pytest.approx(36 / (3 * 14))
    assert effective_sample_size(ones, torch.zeros(4)).item() == 0.0


def test_ess_over_ranks(ragged):
    w = ragged.randn().abs()
    whole = effective_sample_size(w, ragged.mask)
    n = ragged.mask.sum()
    expected = (w * ragged.mask).sum() ** 2 / (n * (w**2 * ragged.mask).sum())
    torch.testing.assert_close(whole, expected)
    seen = []
    for part in (slice(0, 7), slice(7, None)):
        effective_sample_size(w[part], ragged.mask[part], lambda t: seen.append(t) or t)
    torch.testing.assert_close(effective_sample_size(w[:0], ragged.mask[:0], lambda t: t + sum(seen)), whole)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
def test_masked_tokens_are_zero(ragged, spoil):
    new, old = ragged.log_probs(grad=True), ragged.log_probs()
    for f in (ppo_kl, log_prob_abs_diff):
        clean = f(new, old, ragged.mask)
        assert torch.equal(clean, f(ragged.spoiled(new, spoil), ragged.spoiled(old, spoil), ragged.mask))
        assert not clean.requires_grad
    torch.testing.assert_close(ppo_kl(new, old, ragged.mask), ((old - new) * ragged.mask).detach())
    torch.testing.assert_close(log_prob_abs_diff(new, old, ragged.mask), ((old - new).abs() * ragged.mask).detach())
    assert effective_sample_size(ragged.spoiled(new, spoil).exp(), ragged.mask).isfinite()
