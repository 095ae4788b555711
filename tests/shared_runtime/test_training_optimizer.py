"""Schedules against transformers and torch, AdamW against its formula, decay groups, gradient norm and clipping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from shared_runtime.training.distributed import start_rank, stop_rank
from shared_runtime.training.gradients import clip_gradients, gradient_norm, local_gradients
from shared_runtime.training.optimizer import build_optimizer, build_schedule, learning_rate, resume_schedule


def rates(schedule, optimizer, steps):
    out = []
    for _ in range(steps):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def sgd(lr):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_schedule_equals_transformers(style, warmup):
    from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
    from transformers import get_linear_schedule_with_warmup as linear

    ours, theirs = sgd(3e-4), sgd(3e-4)
    reference = {
        "linear": lambda: linear(theirs, warmup, 20),
        "cosine": lambda: get_cosine_schedule_with_warmup(theirs, warmup, 20),
        "constant": lambda: get_constant_schedule_with_warmup(theirs, warmup),
    }[style]()
    schedule = build_schedule(ours, lr=3e-4, decay_style=style, warmup_steps=warmup, decay_steps=20)
    torch.testing.assert_close(rates(schedule, ours, 20), rates(reference, theirs, 20), rtol=1e-12, atol=1e-18)


def test_cosine_to_min_lr_equals_torch():
    ours, theirs = sgd(1e-3), sgd(1e-3)
    schedule = build_schedule(ours, lr=1e-3, min_lr=1e-4, decay_style="cosine", decay_steps=10)
    reference = CosineAnnealingLR(theirs, T_max=10, eta_min=1e-4)
    torch.testing.assert_close(rates(schedule, ours, 11), rates(reference, theirs, 11), rtol=1e-9, atol=0)


@given(
    step=st.integers(0, 60),
    warmup=st.integers(0, 10),
    extra=st.integers(1, 30),
    style=st.sampled_from(["linear", "cosine"]),
)
def test_decay_stays_between_the_bounds_and_ends_at_min_lr(step, warmup, extra, style):
    rate = learning_rate(step, lr=1.0, min_lr=0.25, decay_style=style, warmup_steps=warmup, decay_steps=warmup + extra)
    assert rate <= 1.0
    assert rate >= 0.25 or step < warmup
    if step >= warmup + extra:
        assert rate == pytest.approx(0.25)


def test_schedule_of_zero_rate_and_bad_decay():
    assert rates(build_schedule(o := sgd(0.0), lr=0.0), o, 2) == [0.0, 0.0]
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        learning_rate(5, lr=1.0, decay_style="linear", warmup_steps=2, decay_steps=2)
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        learning_rate(5, lr=1.0, decay_style="quadratic", decay_steps=9)


def test_a_resumed_schedule_goes_on():
    build = {"lr": 1e-2, "decay_style": "cosine", "warmup_steps": 3, "decay_steps": 12}
    whole, resumed = sgd(1e-2), sgd(1e-2)
    expected = rates(build_schedule(whole, **build), whole, 12)
    schedule = build_schedule(resumed, **build)
    resume_schedule(schedule, 7)
    assert rates(schedule, resumed, 5) == pytest.approx(expected[7:], rel=1e-12)
    assert resumed.param_groups[0]["lr"] == schedule.get_last_lr()[0]


def test_only_matrices_are_decayed_and_adamw_follows_its_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    lr, decay, (b1, b2), eps = 0.1, 0.5, (0.9, 0.98), 1e-8
    optimizer = build_optimizer(model.named_parameters(), lr=lr, weight_decay=decay, betas=(b1, b2), eps=eps)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model[0].weight)}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in before.items()}
    for step in (1, 2, 3):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            m, v = moments[name]
            m.mul_(b1).add_((1 - b1) * p.grad)
            v.mul_(b2).add_((1 - b2) * p.grad**2)
            if p.ndim > 1:
                before[name] *= 1 - lr * decay
            before[name] -= lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=1e-10, atol=1e-12)


def test_sgd_is_plain_and_bad_optimizers_are_refused():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer([("p", p)], kind="sgd", lr=0.5, weight_decay=0.9)
    p.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), 1 - 0.5 * (1 + 0.9 * 1)))  # torch's SGD adds decay·p
    with pytest.raises(ValueError, match="--optimizer must be adam or sgd"):
        build_optimizer([("p", p)], kind="lion", lr=1.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer([("p", nn.Parameter(torch.ones(1), requires_grad=False))], lr=1.0)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_norm_and_clipping_equal_torch(max_norm):
    torch.manual_seed(1)
    ours = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in [(5, 3), (7,), (0, 3)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    context = start_rank(device="cpu")
    try:
        gradients = local_gradients(ours)
        norm = gradient_norm(gradients, context.mesh["dp_shard"])
        clip_gradients(gradients, norm, max_norm)
    finally:
        stop_rank(context)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm or math.inf)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)


def test_single_rank_group_is_shared_and_closed_by_its_last_user():
    first, second = start_rank(device="cpu"), start_rank(device="cpu")
    assert first.mesh.shape == (1, 1)
    stop_rank(first)
    assert torch.distributed.is_initialized()
    stop_rank(second)
    assert not torch.distributed.is_initialized()


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="--dp-replicate-size 2 does not divide the 3 trainer ranks"):
        start_rank(rank=0, world_size=3, init_method="file:///tmp/x", dp_replicate_size=2)
    with pytest.raises(ValueError, match="need an init_method"):
        start_rank(rank=0, world_size=2)
