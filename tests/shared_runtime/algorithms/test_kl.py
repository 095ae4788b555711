"""KL estimators: closed forms, unbiasedness on an enumerable distribution, masked and extreme entries."""

from __future__ import annotations

import math

import pytest
import torch

from shared_runtime.algorithms.kl import kl_estimate
from shared_runtime.algorithms.masking import select

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def by_hand(x, kind):
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x / 2
    if kind == "low_var_kl":
        x = max(-20.0, min(20.0, x))
        return max(-10.0, min(10.0, math.exp(-x) - 1 + x))
    return math.exp(-x) - 1 + x


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    x = torch.tensor([0.0, 1e-3, 0.5, -0.5, 2.0, -2.0, -3.0, 25.0, -25.0], dtype=torch.float64)
    ref = torch.full_like(x, -1.25)
    expected = torch.tensor([by_hand(v, kind) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(kl_estimate(ref + x, ref, kind), expected, rtol=1e-12, atol=1e-13)


def test_kinds_differ_and_vanish_at_equality():
    x = torch.tensor([0.7])
    assert len({round(kl_estimate(x, torch.zeros(1), k).item(), 6) for k in ("k1", "k2", "k3")}) == 3
    p = torch.tensor([-0.1, -7.3, -103.0])
    for kind in KINDS:
        assert (kl_estimate(p, p.clone(), kind) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradient(kind, unbiased):
    torch.manual_seed(0)
    p = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref, behavior = torch.randn(2, 6, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 0, 1])
    extra = {"behavior_log_probs": behavior} if unbiased else {}
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, kind, mask=mask, **extra), (p,))
    kl_estimate(p, ref, kind, mask=mask, **extra).sum().backward()
    assert (p.grad[mask == 0] == 0).all()
    assert (p.grad[mask == 1] != 0).all()


def policies():
    torch.manual_seed(1)
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref, behavior = (torch.randn(5, dtype=torch.float64).log_softmax(0) for _ in range(2))
    return theta, ref, behavior


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_variant_has_the_true_kl_and_its_gradient_off_policy(kind):
    """The expectation over the behavior policy, by enumeration, equals KL(π‖π_ref), in value and in gradient."""
    theta, ref, behavior = policies()
    log_p = theta.log_softmax(0)
    true_kl = (log_p.exp() * (log_p - ref)).sum()
    (true_grad,) = torch.autograd.grad(true_kl, theta, retain_graph=True)
    estimate = (behavior.exp() * kl_estimate(log_p, ref, kind, behavior_log_probs=behavior)).sum()
    (grad,) = torch.autograd.grad(estimate, theta)
    torch.testing.assert_close(estimate, true_kl, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, true_grad, rtol=1e-10, atol=1e-14)


def test_on_policy_expectations():
    theta, ref, _ = policies()
    log_p = theta.log_softmax(0)
    p = log_p.exp().detach()
    true_kl = (log_p.exp() * (log_p - ref)).sum()
    (true_grad,) = torch.autograd.grad(true_kl, theta, retain_graph=True)
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(log_p, ref, kind)).sum(), true_kl, rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad((p * kl_estimate(log_p, ref, "k2")).sum(), theta)
    torch.testing.assert_close(grad, true_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_entries_do_not_matter(kind, bad):
    mask = torch.tensor([1.0, 0.0, 1.0])
    p = torch.tensor([-0.5, bad, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.7, bad, -1.0], dtype=torch.float64)
    kl = kl_estimate(p, ref, kind, mask=mask, behavior_log_probs=torch.tensor([-0.6, bad, -1.5], dtype=torch.float64))
    kl.sum().backward()
    assert kl[1] == 0
    assert p.grad[1] == 0
    assert kl.isfinite().all()
    assert p.grad.isfinite().all()


def test_low_var_kl_stays_finite_where_k3_overflows():
    x = torch.tensor([-200.0])
    assert kl_estimate(x, torch.zeros(1), "k3").isinf().all()
    assert kl_estimate(x, torch.zeros(1), "low_var_kl").item() == 10.0


def test_unbiased_ratio_is_multiplied_before_the_clamp():
    p, ref, behavior = torch.tensor([-4.0]), torch.tensor([-1.0]), torch.tensor([-1.0])
    raw = math.exp(3) - 1 - 3  # 16.1, clamped to 10 alone; times e^-3 it is 0.80
    got = kl_estimate(p, ref, "low_var_kl", behavior_log_probs=behavior)
    assert got.item() == pytest.approx(math.exp(-3) * raw, rel=1e-6)


def test_reference_and_behavior_get_no_gradient():
    p, ref, behavior = (torch.randn(3, requires_grad=True) for _ in range(3))
    kl_estimate(p, ref, "k3", behavior_log_probs=behavior).sum().backward()
    assert ref.grad is None
    assert behavior.grad is None
    assert (p.grad != 0).all()


def test_unknown_kind():
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_select_takes_integer_bool_and_float_masks():
    values = torch.tensor([1.0, float("nan"), 3.0])
    for mask in ([1, 0, 1], [True, False, True], [0.5, 0.0, 2.0]):
        assert select(torch.tensor(mask), values, fill=-1.0).tolist() == [1.0, -1.0, 3.0]
