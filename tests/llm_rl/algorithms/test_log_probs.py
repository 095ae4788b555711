"""Chunked log-probs and entropies against torch.distributions, and their gradients against autograd."""

from __future__ import annotations

import pytest
import torch

from llm_rl.algorithms.log_probs import log_probs_from_hidden, log_probs_from_logits

N, H, V = 11, 6, 23


def problem(dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, dtype=dtype, generator=g).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype, generator=g).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    upstream = torch.randn(2, N, dtype=torch.float64, generator=g)
    return hidden, weight, targets, upstream


def reference(logits, targets, temperature):
    d = torch.distributions.Categorical(logits=logits / temperature)
    return d.log_prob(targets), d.entropy()


@pytest.mark.parametrize("chunk_size", [1, 4, 11, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_values_and_gradients(chunk_size, temperature, with_entropy, source):
    hidden, weight, targets, upstream = problem()
    options = {"temperature": temperature, "with_entropy": with_entropy, "chunk_size": chunk_size}
    if source == "hidden":
        got = log_probs_from_hidden(hidden, weight, targets, **options)
    else:
        got = log_probs_from_logits(hidden @ weight.T, targets, **options)
    log_probs, entropy = reference(hidden @ weight.T, targets, temperature)
    torch.testing.assert_close(got.log_probs, log_probs, rtol=1e-12, atol=1e-13)
    expected_loss, loss = (log_probs * upstream[0]).sum(), (got.log_probs * upstream[0]).sum()
    if with_entropy:
        torch.testing.assert_close(got.entropy, entropy, rtol=1e-12, atol=1e-13)
        expected_loss, loss = expected_loss + (entropy * upstream[1]).sum(), loss + (got.entropy * upstream[1]).sum()
    else:
        assert got.entropy is None
    expected = torch.autograd.grad(expected_loss, (hidden, weight))
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_finite_differences():
    hidden, weight, targets, _ = problem()
    options = {"temperature": 0.8, "with_entropy": True, "chunk_size": 4}
    assert torch.autograd.gradcheck(
        lambda h, w: tuple(log_probs_from_hidden(h, w, targets, **options)), (hidden, weight)
    )
    logits = (hidden @ weight.T).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: tuple(log_probs_from_logits(z, targets, **options)), (logits,))


def test_entropy_alone_and_only_one_input_wants_a_gradient():
    hidden, weight, targets, upstream = problem()
    _, entropy = reference(hidden @ weight.T, targets, 1.0)
    expected = torch.autograd.grad((entropy * upstream[1]).sum(), (hidden, weight))
    for i, inputs in enumerate([(hidden, weight.detach()), (hidden.detach(), weight)]):
        got = log_probs_from_hidden(*inputs, targets, with_entropy=True, chunk_size=4)
        (grad,) = torch.autograd.grad((got.entropy * upstream[1]).sum(), inputs[i])
        torch.testing.assert_close(grad, expected[i], rtol=1e-10, atol=1e-12)


def test_observed_entropy_costs_no_gradient_and_changes_none():
    hidden, weight, targets, upstream = problem()
    plain = log_probs_from_hidden(hidden, weight, targets)
    observed = log_probs_from_hidden(hidden, weight, targets, with_entropy=True)
    assert observed.entropy.detach().isfinite().all()
    grads = [torch.autograd.grad((x.log_probs * upstream[0]).sum(), hidden)[0] for x in (plain, observed)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_chunking_does_not_change_logits_path(chunk_size):
    hidden, weight, targets, _ = problem(torch.float32)
    logits = (hidden @ weight.T).detach()
    whole = log_probs_from_logits(logits, targets, with_entropy=True)
    parts = log_probs_from_logits(logits, targets, with_entropy=True, chunk_size=chunk_size)
    assert torch.equal(whole.log_probs, parts.log_probs)
    assert torch.equal(whole.entropy, parts.entropy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_input_gives_float32_probabilities(dtype):
    hidden, weight, targets, upstream = problem(dtype)
    got = log_probs_from_hidden(hidden, weight, targets, with_entropy=True, chunk_size=4)
    assert got.log_probs.dtype == got.entropy.dtype == torch.float32
    exact_h, exact_w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_probs, entropy = reference(exact_h @ exact_w.T, targets, 1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.log_probs.double(), log_probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad((got.log_probs * upstream[0]).sum(), (hidden, weight))
    exact = torch.autograd.grad((log_probs * upstream[0]).sum(), (exact_h, exact_w))
    for a, b in zip(grads, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=5 * tolerance, atol=5 * tolerance)


def test_log_probs_from_logits_leaves_its_input_alone():
    hidden, weight, targets, _ = problem()
    logits = (hidden @ weight.T).detach()
    before = logits.clone()
    log_probs_from_logits(logits, targets, temperature=0.5, with_entropy=True)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e4, -3e4, -3e4]], dtype=torch.float32)
    got = log_probs_from_logits(logits, torch.tensor([1, 2]), with_entropy=True)
    torch.testing.assert_close(got.log_probs, torch.tensor([-1e4, -1.0986123]))
    torch.testing.assert_close(got.entropy, torch.tensor([0.0, 1.0986123]))


def test_forbidden_vocabulary_entries():
    """Padded vocabulary has logit -inf: probability 0, no entropy, no gradient."""
    hidden, weight, targets, upstream = problem()
    targets = targets % (V - 5)
    logits = (hidden @ weight.T).detach()
    padded = logits.clone()
    padded[:, V - 5 :] = -torch.inf
    padded.requires_grad_()
    short = logits[:, : V - 5].clone().requires_grad_()
    grads = []
    for z in (padded, short):
        got = log_probs_from_logits(z, targets, with_entropy=True, chunk_size=4)
        log_probs, entropy = reference(short, targets, 1.0)
        torch.testing.assert_close(got.log_probs, log_probs)
        torch.testing.assert_close(got.entropy, entropy)
        loss = (got.log_probs * upstream[0] + got.entropy * upstream[1]).sum()
        grads.append(torch.autograd.grad(loss, z)[0])
    torch.testing.assert_close(grads[0][:, : V - 5], grads[1])
    assert (grads[0][:, V - 5 :] == 0).all()
    assert log_probs_from_logits(padded, torch.full((N,), V - 1)).log_probs.eq(-torch.inf).all()


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_broken_positions_that_nothing_uses(spoil, with_entropy):
    """A masked position whose hidden state is NaN leaves every gradient finite and as if it were not there."""
    hidden, weight, targets, upstream = problem()
    keep = torch.ones(N, dtype=torch.bool)
    keep[[2, 7]] = False
    broken = hidden.detach().clone()
    broken[~keep] = spoil
    broken.requires_grad_()

    def run(h, mask):
        got = log_probs_from_hidden(h, weight, targets[mask], with_entropy=with_entropy, chunk_size=4)
        loss = (got.log_probs * upstream[0, mask]).masked_fill(~keep[mask], 0).sum()
        if with_entropy:
            loss = loss + (got.entropy * upstream[1, mask]).masked_fill(~keep[mask], 0).sum()
        return loss, *torch.autograd.grad(loss, (h, weight))

    everything = torch.ones_like(keep)
    loss, grad_hidden, grad_weight = run(broken, everything)
    good = hidden.detach()[keep].requires_grad_()
    expected_loss, expected_hidden, expected_weight = run(good, keep)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad_hidden[keep], expected_hidden)
    assert (grad_hidden[~keep] == 0).all()
    torch.testing.assert_close(grad_weight, expected_weight)

    logits = (broken @ weight.T).detach().requires_grad_()
    got = log_probs_from_logits(logits, targets, with_entropy=with_entropy)
    (grad,) = torch.autograd.grad(got.log_probs.masked_fill(~keep, 0).sum(), logits)
    assert (grad[~keep] == 0).all()
    assert grad.isfinite().all()


def test_used_nan_is_not_hidden():
    hidden, weight, targets, _ = problem()
    broken = hidden.detach().clone()
    broken[0, 0] = float("nan")
    broken.requires_grad_()
    got = log_probs_from_hidden(broken, weight, targets)
    assert got.log_probs[0].isnan()
    assert torch.autograd.grad(got.log_probs.sum(), broken)[0][0].isnan().all()


def test_no_positions():
    weight = torch.randn(V, H, requires_grad=True)
    hidden = torch.zeros(0, H, requires_grad=True)
    got = log_probs_from_hidden(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    (got.log_probs.sum() + got.entropy.sum()).backward()
    assert got.log_probs.shape == (0,)
    assert (weight.grad == 0).all()


def test_refusals():
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="positive temperature"):
        log_probs_from_hidden(hidden, weight, targets, temperature=0)
    with pytest.raises(ValueError, match="at least 1"):
        log_probs_from_hidden(hidden, weight, targets, chunk_size=0)
    with pytest.raises(ValueError, match="targets"):
        log_probs_from_logits(hidden @ weight.T, targets[1:])
    with pytest.raises(ValueError, match="don't fit"):
        log_probs_from_hidden(hidden, weight[:, 1:], targets)
