"""Step dynamics against float64 formulas, scipy's normal density, diffusers' scheduler and the flow's own marginals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_rl.algorithms.step_dynamics import FlowCps, FlowOde, FlowSde, Transition, step_dynamics

SHAPE = (3, 4, 5, 5)


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, v, y = (torch.randn(SHAPE, generator=generator, dtype=dtype) for _ in range(3))
    return x, v, y


def sigma(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sde_matches_the_published_formula_at_every_sample() -> None:
    x, v, _ = tensors()
    levels, nexts, sigma_max, eta = (0.9, 0.5, 1.0), (0.7, 0.2, 0.95), (0.95, 0.95, 0.95), 0.7
    got = FlowSde().transition(x, v, sigma(*levels), sigma(*nexts), sigma_max=sigma(*sigma_max), noise_level=eta)
    for i in range(3):
        s, dt = levels[i], nexts[i] - levels[i]
        bounded = sigma_max[i] if s == 1.0 else s
        scale = eta * math.sqrt(s / (1 - bounded))
        a, b = x[i].numpy(), v[i].numpy()
        mean = a * (1 + scale**2 / (2 * s) * dt) + b * (1 + scale**2 * (1 - s) / (2 * s)) * dt
        np.testing.assert_allclose(got.mean[i].numpy(), mean, rtol=1e-12)
        assert got.std.flatten()[i].item() == pytest.approx(scale * math.sqrt(-dt), rel=1e-12)


def test_sigma_one_is_recognised_in_float32() -> None:
    x, v, _ = tensors(dtype=torch.float32)
    step = FlowSde().transition(
        x, v, torch.tensor(1.0), torch.tensor(0.9), sigma_max=torch.tensor(0.9), noise_level=0.7
    )
    assert step.mean.isfinite().all()
    assert step.std.item() == pytest.approx(0.7 * math.sqrt(1 / 0.1) * math.sqrt(0.1), rel=1e-5)


@pytest.mark.parametrize("data_std", [0.5, 2.0])
@pytest.mark.parametrize("level", [0.3, 0.8])
def test_sde_keeps_the_marginals_of_the_flow(data_std: float, level: float) -> None:
    """For Gaussian data the velocity is known, so is the variance at every σ: a step may miss it by O(dt²) only."""

    def variance(s: float) -> float:
        return (1 - s) ** 2 * data_std**2 + s**2

    def error(dt: float) -> float:
        slope = (level - (1 - level) * data_std**2) / variance(level)
        one = torch.ones(1, 1, dtype=torch.float64)
        step = FlowSde().transition(
            one, slope * one, sigma(level), sigma(level - dt), sigma_max=sigma(0.9), noise_level=0.7
        )
        got = step.mean.item() ** 2 * variance(level) + step.std.item() ** 2
        return abs(got - variance(level - dt))

    assert error(1e-3) < 2e-5
    assert error(1e-4) < error(1e-3) / 50


def test_noise_level_zero_is_the_ode_bit_for_bit() -> None:
    x, v, _ = tensors(dtype=torch.float32)
    args = (x, v, torch.tensor(0.8), torch.tensor(0.6))
    ode = FlowOde().transition(*args, sigma_max=torch.tensor(0.9), noise_level=0.7)
    sde = FlowSde().transition(*args, sigma_max=torch.tensor(0.9), noise_level=0.0)
    assert torch.equal(sde.mean, ode.mean)
    assert sde.std.item() == 0.0 == ode.std.item()
    cps = FlowCps().transition(*args, sigma_max=torch.tensor(0.9), noise_level=0.0)
    torch.testing.assert_close(cps.mean, ode.mean, rtol=1e-5, atol=1e-6)


def test_ode_is_the_euler_step_of_diffusers() -> None:
    x, v, _ = tensors(dtype=torch.float32)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    for i, timestep in enumerate(scheduler.timesteps):
        expected = scheduler.step(v, timestep, x, return_dict=False)[0]
        got = FlowOde().transition(
            x, v, scheduler.sigmas[i], scheduler.sigmas[i + 1], sigma_max=scheduler.sigmas[1], noise_level=0.7
        )
        assert torch.equal(got.mean, expected)


def test_cps_at_full_noise_is_the_stochastic_step_of_diffusers() -> None:
    x, v, _ = tensors(dtype=torch.float32)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    scheduler.set_timesteps(5)
    torch.manual_seed(3)
    expected = scheduler.step(v, scheduler.timesteps[0], x, return_dict=False)[0]
    torch.manual_seed(3)
    noise = torch.randn_like(x)
    got = FlowCps().transition(
        x, v, scheduler.sigmas[0], scheduler.sigmas[1], sigma_max=scheduler.sigmas[1], noise_level=1.0
    )
    torch.testing.assert_close(got.sample(noise), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.9])
def test_cps_preserves_the_coefficients(eta: float) -> None:
    """With the exact velocity ε - x₀ the step leaves (1-σ')·x₀ and noise of total std σ'."""
    clean, noise, _ = tensors()
    level, following = 0.8, 0.55
    x = (1 - level) * clean + level * noise
    got = FlowCps().transition(x, noise - clean, sigma(level), sigma(following), sigma_max=sigma(0.9), noise_level=eta)
    rest = got.mean - (1 - following) * clean
    coefficient = (rest / noise).mean().item()
    assert got.std.item() == pytest.approx(following * math.sin(eta * math.pi / 2))
    assert math.hypot(coefficient, got.std.item()) == pytest.approx(following, rel=1e-9)


def test_log_prob_is_the_mean_of_the_normal_log_density() -> None:
    x, v, y = tensors()
    step = FlowSde().transition(x, v, sigma(0.9, 0.6, 0.4), sigma(0.7, 0.4, 0.1), sigma_max=sigma(0.9), noise_level=0.6)
    got = FlowSde().log_prob(y, step)
    density = scipy.stats.norm.logpdf(y.numpy(), step.mean.numpy(), step.std.numpy())
    np.testing.assert_allclose(got.numpy(), density.reshape(3, -1).mean(axis=1), rtol=1e-12)
    assert not np.allclose(got.numpy(), density.reshape(3, -1).sum(axis=1))


def test_log_prob_without_constants_and_of_cps_is_minus_the_squared_error() -> None:
    x, v, y = tensors()
    args = (x, v, sigma(0.9), sigma(0.7))
    for dynamics, constants in ((FlowSde(), False), (FlowCps(), True), (FlowCps(), False)):
        step = dynamics.transition(*args, sigma_max=sigma(0.9), noise_level=0.6)
        expected = -((y - step.mean) ** 2).reshape(3, -1).mean(dim=1)
        torch.testing.assert_close(dynamics.log_prob(y, step, constants=constants), expected)


def test_log_prob_has_the_score_as_its_gradient_and_none_at_the_data() -> None:
    x, v, y = tensors()
    v.requires_grad_(True)
    y.requires_grad_(True)
    step = FlowSde().transition(x, v, sigma(0.9), sigma(0.7), sigma_max=sigma(0.9), noise_level=0.6)
    step.mean.retain_grad()
    FlowSde().log_prob(y, step).sum().backward()
    assert y.grad is None
    size = math.prod(SHAPE[1:])
    torch.testing.assert_close(step.mean.grad, ((y - step.mean) / step.std**2 / size).detach())


def test_half_precision_is_computed_in_float32() -> None:
    x, v, y = tensors(dtype=torch.float32)
    half = FlowSde().transition(
        x.bfloat16(), v.bfloat16(), torch.tensor(0.9), torch.tensor(0.7), sigma_max=torch.tensor(0.9), noise_level=0.6
    )
    assert half.mean.dtype == torch.float32
    assert FlowSde().log_prob(y.bfloat16(), half).dtype == torch.float32


def test_which_steps_have_noise() -> None:
    assert FlowSde().stochastic(0.0, 0.7)
    assert not FlowSde().stochastic(0.5, 0.0)
    assert FlowCps().stochastic(0.5, 0.7)
    assert not FlowCps().stochastic(0.0, 0.7)
    assert not FlowOde().stochastic(0.5, 0.7)


def test_names() -> None:
    assert isinstance(step_dynamics("cps"), FlowCps)
    with pytest.raises(ValueError, match="sde, cps, ode"):
        step_dynamics("ddpm")
    with pytest.raises(ValueError, match="ode has no log-probs"):
        step_dynamics("ode").log_prob(torch.zeros(1, 1), Transition(torch.zeros(1, 1), torch.zeros(())))


def test_batch_sizes_must_agree() -> None:
    x, v, _ = tensors()
    with pytest.raises(ValueError, match="each of 3 samples"):
        FlowOde().transition(x, v, sigma(0.9, 0.8), sigma(0.7), sigma_max=sigma(0.9), noise_level=0.7)
