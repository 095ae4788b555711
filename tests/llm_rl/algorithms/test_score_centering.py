"""Score centering against a dense distribution over a small vocabulary."""

from __future__ import annotations

import pytest
import torch

from llm_rl.algorithms.candidates import candidate_log_probs, support_log_probs
from llm_rl.algorithms.score_centering import score_centering_loss, usable_for_kl

V, N = 7, 6
MODES = ["none", "tis", "mis"]


def f(ratio, mode):
    if mode == "none":
        return torch.ones_like(ratio)
    if mode == "tis":
        return torch.minimum(ratio, torch.tensor(2.0, dtype=ratio.dtype))
    return ratio * ((ratio >= 0.5) & (ratio <= 5.0))


def draw(gap=1.0):
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(N, V, dtype=torch.float64, generator=g)
    other = torch.randn(N, V, dtype=torch.float64, generator=g)
    q = (logits + gap * other).log_softmax(1)
    targets = torch.randint(0, V, (N,), generator=g)
    advantages = torch.randn(N, dtype=torch.float64, generator=g)
    return logits.requires_grad_(), q, targets, advantages


def pick(x, ids):
    return x.gather(1, ids[:, None]).squeeze(1)


def run(logits, q, targets, head, advantages, mode, mask=None, q_head=None):
    log_p = logits.log_softmax(1)
    mask = torch.ones(len(targets)) if mask is None else mask
    q_head = q.gather(1, head.clamp(min=0)).masked_fill(head < 0, -torch.inf) if q_head is None else q_head
    head_p = candidate_log_probs(logits, head)
    return score_centering_loss(
        pick(log_p, targets), pick(q, targets), head_p, q_head, advantages, mask, importance_sampling=mode
    )


def dense_gradient(logits, q, targets, advantages, mode, model_q):
    """-A·(f·∇log p_t - Σ_v q_v f_v ∇log p_v), summed over the whole vocabulary; the sampled token keeps its own q."""
    log_p = logits.log_softmax(1)
    p = log_p.exp().detach()
    own = f(pick(p, targets) / pick(q.exp(), targets), mode) * pick(log_p, targets)
    expected = (model_q * f(p / model_q, mode) * log_p).sum(1)
    return torch.autograd.grad(-(advantages * (own - expected)).sum(), logits)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 3, V])
def test_gradient_equals_the_dense_one_with_a_proportional_tail(mode, k):
    logits, q, targets, advantages = draw()
    head = q.topk(k, dim=1).indices
    p, model_q = logits.softmax(1).detach(), q.exp()
    in_head = torch.zeros(N, V, dtype=torch.bool).scatter(1, head, True)
    if k < V:
        rho = model_q.masked_fill(in_head, 0).sum(1) / p.masked_fill(in_head, 0).sum(1)
        model_q = torch.where(in_head, model_q, rho[:, None] * p)
    assert k == V or (~pick(in_head, targets)).any()  # some sampled tokens lie outside the head
    loss = run(logits, q, targets, head, advantages, mode).loss.sum()
    (grad,) = torch.autograd.grad(loss, logits)
    expected = dense_gradient(logits, q, targets, advantages, mode, model_q)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_a_constant_reward_gives_no_update_on_average(mode):
    """Σ_a q(a)·∇loss(a) = 0 with the full distribution as the head."""
    logits, q, _, _ = draw(gap=2.0)
    head = torch.arange(V).expand(N, V)
    total = 0.0
    for a in range(V):
        loss = run(logits, q, torch.full((N,), a), head, torch.ones(N), mode).loss
        total = total + (q[:, a].exp() * loss).sum()
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


def test_without_centering_a_constant_reward_would_drift():
    logits, q, _, _ = draw(gap=2.0)
    drift = torch.autograd.grad(-(q.exp() * logits.log_softmax(1)).sum(), logits)[0]
    assert drift.abs().max() > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_value_by_the_formula(mode):
    logits, q, targets, advantages = draw()
    head = q.topk(3, dim=1).indices
    got = run(logits, q, targets, head, advantages, mode)
    log_p = logits.log_softmax(1).detach()
    for t in range(N):
        p_h, q_h = log_p[t, head[t]].exp(), q[t, head[t]].exp()
        rho = (1 - q_h.sum()) / (1 - p_h.sum())
        alpha = rho * f(1 / rho, mode)
        c = q_h * f(p_h / q_h, mode) - alpha * p_h
        correction = (c * p_h.log()).sum()
        weight = f((log_p[t, targets[t]] - q[t, targets[t]]).exp(), mode)
        loss = -advantages[t] * (weight * log_p[t, targets[t]] - correction)
        torch.testing.assert_close(got.loss[t], loss)
        torch.testing.assert_close(got.correction[t], correction)
        torch.testing.assert_close(got.importance_weight[t], weight)
        torch.testing.assert_close(got.tail_ratio[t], rho)
        torch.testing.assert_close(got.train_head_mass[t], p_h.sum())
        torch.testing.assert_close(got.rollout_head_mass[t], q_h.sum())


def test_unused_slots_change_nothing():
    logits, q, targets, advantages = draw()
    head = q.topk(3, dim=1).indices
    padded = torch.cat([head, torch.full((N, 2), -1)], dim=1)
    a, b = (run(logits, q, targets, h, advantages, "tis").loss for h in (head, padded))
    torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (a, b)]
    torch.testing.assert_close(*grads)


def test_filtered_sampling_uses_the_support_and_has_no_tail():
    logits, q, targets, advantages = draw()
    support = q.topk(4, dim=1).indices
    targets = support[:, 1]
    q_head = q.gather(1, support).log_softmax(1)
    replay = support_log_probs(logits, targets, support)
    got = score_centering_loss(
        replay.log_probs, q_head[:, 1], replay.candidate_log_probs, q_head, advantages, torch.ones(N)
    )
    for mass in (got.train_head_mass, got.rollout_head_mass, got.tail_ratio):
        torch.testing.assert_close(mass, torch.ones(N, dtype=torch.float64))
    (grad,) = torch.autograd.grad(got.loss.sum(), logits)
    log_p = logits.gather(1, support).log_softmax(1)
    dense = -(advantages * (log_p[:, 1] - (q_head.exp() * log_p).sum(1))).sum()
    torch.testing.assert_close(grad, torch.autograd.grad(dense, logits)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_change_nothing(spoil, mode):
    g = torch.Generator().manual_seed(0)
    clean = [-torch.rand(N, dtype=torch.float64, generator=g) for _ in range(2)]
    clean += [-1 - torch.rand(N, 3, dtype=torch.float64, generator=g) for _ in range(2)]
    clean.append(torch.randn(N, dtype=torch.float64, generator=g))
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[mask == 0] = spoil
    results = []
    for inputs in (clean, dirty):
        inputs[0].requires_grad_()
        inputs[2].requires_grad_()
        got = score_centering_loss(*inputs, mask, importance_sampling=mode)
        grads = torch.autograd.grad(got.loss.sum(), (inputs[0], inputs[2]))
        results.append([got.loss, got.correction, got.tail_ratio, got.importance_weight, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert (a[mask == 0] == 0).all()
        assert a.isfinite().all()


def test_tiny_tails_stay_finite():
    logits = torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[50.0, 0.0, 1.0]], dtype=torch.float64).log_softmax(1)
    for mode in MODES:
        loss = run(logits, q, torch.tensor([1]), torch.tensor([[0]]), torch.ones(1), mode).loss.sum()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_refusals():
    x, h = torch.zeros(1), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="one of none, tis, mis"):
        score_centering_loss(x, x, h, h, x, x, importance_sampling="icepop")
    with pytest.raises(ValueError, match="out of order"):
        score_centering_loss(x, x, h, h, x, x, mis_low=3.0, mis_high=2.0)


def test_tokens_whose_kl_would_overflow_are_left_out():
    inf, nan = float("inf"), float("nan")
    p = torch.tensor([-1.0, -1.0, -50.0, nan, -inf, -inf, -1.0, -1.0])
    ref = torch.tensor([-2.0, -60.0, -1.0, -1.0, -1.0, -inf, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -1.0, -50.0, -1.0, -1.0, -1.0, -45.0, -1.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])
    assert usable_for_kl(p, ref, mask).tolist() == [True, False, False, False, False, False, True, False]
    both = usable_for_kl(p, ref, mask, rollout_log_probs=rollout)
    assert both.tolist() == [True, False, False, False, False, False, False, False]
