"""The weighted sum equals the textbook mean, however the step is cut into micro-batches, rows and ranks."""

from __future__ import annotations

import pytest
import torch

from llm_rl.algorithms.reduction import masked_sum, token_weights
from llm_rl.algorithms.segments import Segments

SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]


def loss_of(x, mask, lengths, **kwargs):
    weights = token_weights(mask, Segments.of(lengths), dtype=torch.float64, **kwargs)
    return masked_sum(x, weights)


def totals(ragged, per_token):
    return {"per_token": per_token, "global_num_samples": 6, "global_num_tokens": int(ragged.mask.sum())}


def test_per_sample_is_the_mean_of_means(ragged):
    x = ragged.randn()
    pairs = zip(ragged.samples(x), ragged.samples(ragged.mask), strict=True)
    expected = sum((v * m).sum() / max(int(m.sum()), 1) for v, m in pairs) / 6
    torch.testing.assert_close(loss_of(x, ragged.mask, ragged.lengths, **totals(ragged, False)), expected)


def test_per_token_divides_once_by_all_tokens(ragged):
    x = ragged.randn()
    expected = x[ragged.mask == 1].mean()
    torch.testing.assert_close(loss_of(x, ragged.mask, ragged.lengths, **totals(ragged, True)), expected)


def test_dr_grpo_divides_by_a_constant(ragged):
    x = ragged.randn()
    expected = x[ragged.mask == 1].sum() / (100 * 6)
    got = loss_of(x, ragged.mask, ragged.lengths, constant=100, **totals(ragged, False))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cuts", [[6], [1] * 6, [2, 0, 4], [5, 1]])
def test_micro_batches_and_ranks_add_up(ragged, per_token, cuts):
    x = ragged.randn(grad=True)
    whole = loss_of(x, ragged.mask, ragged.lengths, **totals(ragged, per_token))
    (expected,) = torch.autograd.grad(whole, x)
    parts, row, token = [], 0, 0
    for rows in cuts:
        lengths = ragged.lengths[row : row + rows]
        here = slice(token, token + sum(lengths))
        parts.append(loss_of(x[here], ragged.mask[here], lengths, **totals(ragged, per_token)))
        row, token = row + rows, here.stop
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-15)
    (grad,) = torch.autograd.grad(sum(parts), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)


def test_order_of_samples_does_not_matter(ragged):
    x = ragged.randn()
    order = [5, 2, 0, 4, 1, 3]
    shuffled = torch.cat([ragged.samples(x)[i] for i in order])
    mask = torch.cat([ragged.samples(ragged.mask)[i] for i in order])
    for per_token in (False, True):
        a = loss_of(x, ragged.mask, ragged.lengths, **totals(ragged, per_token))
        b = loss_of(shuffled, mask, [ragged.lengths[i] for i in order], **totals(ragged, per_token))
        torch.testing.assert_close(a, b)


def test_a_rollout_cut_into_rows_counts_once():
    x, mask = torch.arange(1.0, 8.0, dtype=torch.float64), torch.ones(7)
    whole = loss_of(x, mask, [5, 2], per_token=False, global_num_samples=2, global_num_tokens=7)
    rows = loss_of(
        x,
        mask,
        [2, 3, 2],
        per_token=False,
        global_num_samples=2,
        global_num_tokens=7,
        sample_num_tokens=torch.tensor([5, 5, 2]),
    )
    torch.testing.assert_close(rows, whole)
    assert whole.item() == pytest.approx((3 + 6.5) / 2)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("per_token", [False, True])
def test_masked_values_reach_neither_loss_nor_gradient(ragged, spoil, per_token):
    clean = ragged.randn(grad=True)
    dirty = ragged.spoiled(clean, spoil)
    losses = [loss_of(x, ragged.mask, ragged.lengths, **totals(ragged, per_token)) for x in (clean, dirty)]
    grads = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (clean, dirty), strict=True)]
    assert losses[0] == losses[1]
    assert torch.equal(*grads)


@pytest.mark.parametrize("per_token", [False, True])
def test_nothing_trainable_is_zero_with_a_gradient(per_token):
    for lengths in ([], [0], [3]):
        x = torch.full((sum(lengths),), float("nan"), requires_grad=True)
        counts = {"per_token": per_token, "global_num_samples": 0, "global_num_tokens": 0}
        loss = loss_of(x, torch.zeros(sum(lengths)), lengths, **counts)
        loss.backward()
        assert loss.item() == 0.0
        assert (x.grad == 0).all()


def test_refusals():
    s = Segments.of([2])
    counts = {"global_num_samples": 1, "global_num_tokens": 2}
    with pytest.raises(ValueError, match="no meaning with per_token"):
        token_weights(torch.ones(2), s, per_token=True, constant=3, **counts)
    with pytest.raises(ValueError, match="must be positive"):
        token_weights(torch.ones(2), s, per_token=False, constant=0, **counts)
    with pytest.raises(ValueError, match="2 response tokens"):
        token_weights(torch.ones(3), s, per_token=False, **counts)
