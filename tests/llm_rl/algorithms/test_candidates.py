"""Candidate and support log-probabilities against dense softmaxes over small vocabularies."""

from __future__ import annotations

import pytest
import torch

from llm_rl.algorithms.candidates import (
    candidate_log_probs,
    check_support,
    from_hidden_in_chunks,
    support_log_probs,
    top_k_log_probs,
)

V = 9
SUPPORT = torch.tensor([[3, 1, 7, -1], [0, -1, -1, -1], [2, 4, 6, 8], [5, -1, -1, -1]])
TARGETS = torch.tensor([7, 0, 4, 5])


def draw(seed=0, n=4):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, V, dtype=torch.float64, generator=g).requires_grad_()


def dense_support(logits, temperature):
    """Forbidden tokens get -inf, then an ordinary softmax: the distribution that was sampled from."""
    allowed = torch.zeros(len(SUPPORT), V, dtype=torch.bool)
    for row, ids in enumerate(SUPPORT.tolist()):
        allowed[row, [i for i in ids if i >= 0]] = True
    return torch.distributions.Categorical(logits=(logits / temperature).masked_fill(~allowed, -1e9))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_support_replay(temperature):
    logits = draw()
    d = dense_support(logits, temperature)
    got = support_log_probs(logits, TARGETS, SUPPORT, temperature=temperature)
    torch.testing.assert_close(got.log_probs, d.log_prob(TARGETS))
    torch.testing.assert_close(got.entropy, d.entropy())
    for row, ids in enumerate(SUPPORT.tolist()):
        for slot, i in enumerate(ids):
            expected = d.logits.log_softmax(1)[row, i].item() if i >= 0 else -float("inf")
            assert got.candidate_log_probs[row, slot].item() == pytest.approx(expected)
    weights = torch.randn(2, 4, dtype=torch.float64)
    losses = [
        (lp * weights[0] + h * weights[1]).sum() for lp, h in ((got[0], got[2]), (d.log_prob(TARGETS), d.entropy()))
    ]
    grads = [torch.autograd.grad(x, logits)[0] for x in losses]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_a_single_token_support_has_log_prob_zero_and_no_gradient():
    logits = draw()
    got = support_log_probs(logits, TARGETS, SUPPORT)
    assert got.log_probs[1] == got.log_probs[3] == 0.0
    (grad,) = torch.autograd.grad(got.log_probs.sum(), logits)
    assert (grad[[1, 3]] == 0).all()


def test_the_whole_vocabulary_as_support_is_the_ordinary_log_prob():
    logits = draw()
    everything = torch.arange(V).flip(0).expand(4, V)
    got = support_log_probs(logits, TARGETS, everything)
    torch.testing.assert_close(got.log_probs, logits.log_softmax(1).gather(1, TARGETS[:, None]).squeeze(1))


def test_a_target_outside_its_support():
    logits = draw()
    wrong = TARGETS.clone()
    wrong[2] = 3
    assert support_log_probs(logits, wrong, SUPPORT).log_probs[2] == -torch.inf
    check_support(TARGETS, SUPPORT)
    with pytest.raises(ValueError, match=r"position 2: the sampled token 3 .* 4 tokens"):
        check_support(wrong, SUPPORT)
    twice = SUPPORT.clone()
    twice[0, 3] = 3
    with pytest.raises(ValueError, match="position 0"):
        check_support(TARGETS, twice)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_change_nothing(spoil):
    clean, ids = draw(), SUPPORT.clone()
    mask = torch.tensor([1, 0, 1, 0])
    empty = ids.clone()
    empty[mask == 0] = -1  # observation rows carry no candidates
    broken = clean.detach().clone()
    broken[mask == 0] = spoil
    broken.requires_grad_()
    results = []
    for logits, support in ((clean, ids), (broken, empty)):
        replay = support_log_probs(logits, TARGETS, support, mask=mask)
        full = candidate_log_probs(logits, support, mask=mask)
        keep = mask == 1
        loss = replay.log_probs[keep].sum() + replay.entropy[keep].sum() + full[:, :1][keep].sum()
        results.append((loss, torch.autograd.grad(loss, logits)[0]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][1].isfinite().all()


def test_candidates_over_the_full_vocabulary():
    logits = draw()
    got = candidate_log_probs(logits, SUPPORT, temperature=0.6)
    dense = (logits / 0.6).log_softmax(1)
    for row, ids in enumerate(SUPPORT.tolist()):
        for slot, i in enumerate(ids):
            assert got[row, slot].item() == pytest.approx(dense[row, i].item() if i >= 0 else -float("inf"))
    used = SUPPORT >= 0
    weights = torch.randn(SUPPORT.shape, dtype=torch.float64)
    loss = (got.masked_fill(~used, 0) * weights).sum()
    expected = (dense.gather(1, SUPPORT.clamp(min=0)) * weights * used).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])


def test_top_k():
    logits = draw()
    ids, log_probs = top_k_log_probs(logits, 3, temperature=0.8)
    dense = (logits / 0.8).log_softmax(1)
    torch.testing.assert_close(log_probs, dense.topk(3, dim=1).values.detach())
    torch.testing.assert_close(dense.gather(1, ids).detach(), log_probs)
    assert not log_probs.requires_grad


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_from_hidden_in_chunks(chunk_size):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 5, dtype=torch.float64, generator=g).requires_grad_()
    weight = torch.randn(V, 5, dtype=torch.float64, generator=g).requires_grad_()
    upstream = torch.randn(4, dtype=torch.float64, generator=g)
    chunked = from_hidden_in_chunks(support_log_probs, hidden, weight, TARGETS, SUPPORT, chunk_size=chunk_size)
    whole = support_log_probs(hidden @ weight.T, TARGETS, SUPPORT)
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad((x[0] * upstream).sum(), (hidden, weight)) for x in (chunked, whole)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)

    mask = torch.tensor([1, 1, 0, 1])
    broken = hidden.detach().clone()
    broken[2] = float("nan")
    broken.requires_grad_()
    (got,) = from_hidden_in_chunks(
        lambda z, ids: candidate_log_probs(z, ids).amax(dim=1),
        broken,
        weight,
        SUPPORT,
        chunk_size=chunk_size,
        mask=mask,
    )
    for grad in torch.autograd.grad((got * mask).sum(), (broken, weight)):
        assert grad.isfinite().all()


def test_no_positions():
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.randn(V, 5, requires_grad=True)
    none = torch.zeros(0, 4, dtype=torch.int64)
    out = from_hidden_in_chunks(support_log_probs, hidden, weight, torch.zeros(0, dtype=torch.int64), none)
    assert [tuple(x.shape) for x in out] == [(0,), (0, 4), (0,)]
    out[0].sum().backward()
    assert (weight.grad == 0).all()
