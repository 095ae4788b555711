"""Losses against plain float64 loops, torch's own distributions and diffusers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_rl.algorithms.ema import ema_decay, ema_update_
from diffusion_rl.algorithms.flow_grpo import flow_grpo_loss, reference_kl
from diffusion_rl.algorithms.grpo_guard import guard_log_ratio
from diffusion_rl.algorithms.nft import add_noise, nft_loss, optimality, velocity_distance
from diffusion_rl.algorithms.sft import flow_matching_loss, logit_normal_sigmas, shift_sigma
from diffusion_rl.algorithms.step_dynamics import FlowSde


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_flow_grpo_matches_a_loop() -> None:
    log_ratio, advantages = randn(64, seed=1) * 3e-4, randn(64, seed=2) * 4
    got = flow_grpo_loss(log_ratio, advantages, clip_range=1e-4, adv_clip_max=5.0)
    for i in range(64):
        a = min(max(advantages[i].item(), -5.0), 5.0)
        ratio = math.exp(log_ratio[i].item())
        clipped = min(max(ratio, 1 - 1e-4), 1 + 1e-4)
        assert got.loss[i].item() == pytest.approx(max(-a * ratio, -a * clipped), rel=1e-12)
        assert got.clipped[i].item() == float(-a * clipped > -a * ratio)
        assert got.ratio[i].item() == pytest.approx(ratio, rel=1e-12)
    assert 0 < got.clipped.sum() < 64


def test_flow_grpo_gradient_is_that_of_reinforce_inside_the_clip_and_zero_beyond() -> None:
    log_ratio = torch.tensor([0.0, 5e-4, -5e-4, 5e-4, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, 1.0, 1.0, -1.0, 9.0], dtype=torch.float64)
    flow_grpo_loss(log_ratio, advantages, clip_range=1e-4).loss.sum().backward()
    expected = [-2.0, 0.0, -math.exp(-5e-4), math.exp(5e-4), -5.0]
    np.testing.assert_allclose(log_ratio.grad.numpy(), expected, rtol=1e-12)


def test_flow_grpo_refuses_bad_ranges() -> None:
    with pytest.raises(ValueError, match="clip_range"):
        flow_grpo_loss(torch.zeros(1), torch.zeros(1), clip_range=-1.0)
    with pytest.raises(ValueError, match="adv_clip_max"):
        flow_grpo_loss(torch.zeros(1), torch.zeros(1), adv_clip_max=0.0)


def test_reference_kl_is_the_mean_kl_of_the_normals() -> None:
    mean, ref = randn(4, 3, 2, seed=1).requires_grad_(True), randn(4, 3, 2, seed=2).requires_grad_(True)
    std = torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64).reshape(4, 1, 1)
    got = reference_kl(mean, ref, std)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(ref, std)
    )
    torch.testing.assert_close(got, expected.flatten(1).mean(1))
    got.sum().backward()
    assert ref.grad is None
    assert mean.grad.abs().sum() > 0


def test_guard_removes_shift_and_scale() -> None:
    """With y = μ_old + std·ε the guarded log-ratio is mean(ε·(μ - μ_old)), whatever the step."""
    latents, velocity, old_velocity, noise = (randn(3, 4, 4, seed=s) for s in range(4))
    levels = (torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.8, 0.3, 0.0]))
    kwargs = {"sigma_max": torch.tensor(0.9), "noise_level": 0.7}
    new = FlowSde().transition(latents, velocity, *levels, **kwargs)
    old = FlowSde().transition(latents, old_velocity, *levels, **kwargs)
    y = old.sample(noise)
    got = guard_log_ratio(FlowSde().log_prob(y, new), FlowSde().log_prob(y, old), new.mean, old.mean, new.std)
    expected = (noise * (new.mean - old.mean)).flatten(1).mean(1)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_optimality() -> None:
    advantages = torch.tensor([-9.0, -5.0, -2.5, 0.0, 2.5, 5.0, 9.0])
    got = optimality(advantages, adv_clip_max=5.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("adaptive", [True, False])
def test_nft_matches_a_loop(adaptive: bool) -> None:
    v, old, clean, noise = (randn(3, 2, 4, seed=s) for s in range(4))
    t, r, beta, a_max = torch.tensor([0.2, 0.6, 0.95], dtype=torch.float64), torch.tensor([0.0, 0.3, 1.0]), 0.4, 5.0
    noisy = add_noise(clean, noise, t)
    got = nft_loss(v, old, clean, noisy, t, r, beta=beta, adv_clip_max=a_max, adaptive_weight=adaptive)
    for i in range(3):
        x0, xt = clean[i].numpy(), noisy[i].numpy()
        np.testing.assert_allclose(xt, (1 - t[i].item()) * x0 + t[i].item() * noise[i].numpy())
        errors = []
        for branch in (beta * v[i] + (1 - beta) * old[i], (1 + beta) * old[i] - beta * v[i]):
            predicted = xt - t[i].item() * branch.numpy()
            weight = max(np.abs(predicted - x0).mean(), 1e-5) if adaptive else 1.0
            errors.append(((predicted - x0) ** 2).mean() / weight)
        expected = a_max * (r[i].item() * errors[0] + (1 - r[i].item()) * errors[1]) / beta
        assert got.loss[i].item() == pytest.approx(expected, rel=1e-6)
        assert [got.positive[i].item(), got.negative[i].item()] == pytest.approx(errors, rel=1e-9)


def test_nft_gradient_vanishes_at_a_neutral_reward_and_points_at_the_image_otherwise() -> None:
    old, clean, noise = (randn(1, 2, 4, seed=s) for s in range(3))
    t = torch.tensor([0.5], dtype=torch.float64)
    noisy = add_noise(clean, noise, t)
    towards_target = (noise - clean) - old

    def gradient(optimal: float) -> torch.Tensor:
        velocity = old.clone().requires_grad_(True)
        nft_loss(velocity, old, clean, noisy, t, torch.tensor([optimal])).loss.sum().backward()
        return velocity.grad

    assert gradient(0.5).abs().max() < 1e-12
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(-gradient(1.0).flatten(), towards_target.flatten(), dim=0) > 0.999
    assert cosine(-gradient(0.0).flatten(), towards_target.flatten(), dim=0) < -0.999


def test_nft_weight_is_floored_and_old_velocity_has_no_gradient() -> None:
    clean, noise = randn(1, 8, seed=1), randn(1, 8, seed=2)
    t = torch.tensor([0.5], dtype=torch.float64)
    old = (noise - clean).requires_grad_(True)
    velocity = (noise - clean + 1e-9).requires_grad_(True)
    loss = nft_loss(velocity, old, clean, add_noise(clean, noise, t), t, torch.tensor([1.0])).loss
    loss.sum().backward()
    assert old.grad is None
    assert loss.item() == pytest.approx(5.0 * (0.5e-9) ** 2 / 1e-5, rel=1e-4)
    with pytest.raises(ValueError, match="--diffusion-nft-beta"):
        nft_loss(velocity, old, clean, clean, t, torch.tensor([1.0]), beta=0.0)


def test_velocity_distance() -> None:
    v, ref = randn(2, 3, seed=1), randn(2, 3, seed=2)
    np.testing.assert_allclose(velocity_distance(v, ref).numpy(), ((v - ref) ** 2).numpy().mean(axis=1), rtol=1e-12)


def test_sft_loss_and_noising_match_diffusers() -> None:
    clean, noise, velocity = (randn(2, 4, 3, 3, seed=s).float() for s in range(3))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    indices = torch.tensor([100, 700])
    expected = scheduler.scale_noise(clean, scheduler.timesteps[indices], noise)
    torch.testing.assert_close(add_noise(clean, noise, scheduler.sigmas[indices]), expected)
    target = ((velocity - (noise - clean)) ** 2).reshape(2, -1).mean(dim=1)
    torch.testing.assert_close(flow_matching_loss(velocity, clean, noise), target)
    unshifted = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    torch.testing.assert_close(shift_sigma(unshifted, 3.0), scheduler.sigmas)


def test_sigmas_are_logit_normal_and_shifted() -> None:
    draws = logit_normal_sigmas(4000, torch.Generator().manual_seed(0), shift=3.0, mean=0.5, std=1.5).double()
    assert 0 < draws.min() < draws.max() < 1
    unshifted = draws / (3.0 - 2.0 * draws)
    normal = (scipy.special.logit(unshifted.numpy()) - 0.5) / 1.5
    assert scipy.stats.kstest(normal, "norm").pvalue > 0.01
    with pytest.raises(ValueError, match="positive"):
        shift_sigma(draws, 0.0)


def test_ema_schedule() -> None:
    assert [ema_decay(step) for step in (0, 1, 10, 400, 500, 9000)] == pytest.approx([0, 0.001, 0.01, 0.4, 0.5, 0.5])
    kwargs = {"decay_init": 0.2, "decay_ramp": 0.0075, "decay_max": 0.999, "flat_steps": 75}
    assert [ema_decay(s, **kwargs) for s in (0, 74, 75, 76, 175, 300)] == pytest.approx(
        [0.2, 0.2, 0.0, 0.0075, 0.75, 0.999]
    )


def test_ema_update_is_the_weighted_mean_and_keeps_its_dtype() -> None:
    averages, parameters = [randn(3, seed=1)], [randn(3, seed=2).float()]
    before = averages[0].clone()
    ema_update_(averages, parameters, 0.9)
    torch.testing.assert_close(averages[0], 0.9 * before + 0.1 * parameters[0].double())
    assert averages[0].dtype == torch.float64
    ema_update_(averages, parameters, 0.0)
    assert torch.equal(averages[0], parameters[0].double())
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        ema_update_(averages, parameters, 1.5)
