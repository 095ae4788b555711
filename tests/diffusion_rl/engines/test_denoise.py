"""The denoising loop on a model whose velocity is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_rl.algorithms.step_dynamics import FlowCps, FlowOde, FlowSde
from diffusion_rl.engines.denoise import denoise, draw_noise, step_noise_drawer
from diffusion_rl.models.family import Schedule

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
SCHEDULE = Schedule(SIGMAS, SIGMAS[:-1] * 1000)
TARGET = torch.full((2, 3, 4), 0.25)


def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
    """The exact flow to TARGET."""
    return (latents - TARGET) / (timestep / 1000)


def drawer(seed: int = 0, calls: list[Tensor] | None = None):
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        noise = torch.randn(2, 3, 4, generator=generator)
        if calls is not None:
            calls.append(noise)
        return noise

    return draw


NOISE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(9))


def test_the_ode_reaches_the_target() -> None:
    done = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowOde(), 0.7)
    torch.testing.assert_close(done.clean, TARGET, atol=1e-6, rtol=0)
    assert done.latents.shape == (2, 5, 3, 4)
    assert torch.equal(done.latents[:, 0], NOISE)
    assert torch.equal(done.latents[:, -1], done.clean)
    assert done.sde_steps == ()
    assert done.log_probs.shape == (2, 0)
    for i, sigma in enumerate(SIGMAS):
        torch.testing.assert_close(done.latents[:, i], (1 - sigma) * TARGET + sigma * NOISE, atol=1e-6, rtol=1e-5)


def test_noise_level_zero_is_the_ode_and_draws_nothing() -> None:
    calls: list[Tensor] = []
    ode = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowOde(), 0.7)
    sde = denoise(velocity, NOISE, drawer(calls=calls), SCHEDULE, FlowSde(), 0.0)
    assert torch.equal(ode.clean, sde.clean)
    assert sde.sde_steps == ()
    assert calls == []


def test_steps_outside_the_window_follow_the_ode_and_keep_the_noise_of_the_others() -> None:
    full = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowSde(), 0.7)
    calls: list[Tensor] = []
    window = denoise(velocity, NOISE, drawer(calls=calls), SCHEDULE, FlowSde(), 0.7, sde_steps=[2, 1])
    assert full.sde_steps == (0, 1, 2, 3)
    assert window.sde_steps == (1, 2)
    assert window.log_probs.shape == (2, 2)
    x0, x1, x2 = (window.latents[:, i] for i in range(3))
    torch.testing.assert_close(x1, x0 + (SIGMAS[1] - SIGMAS[0]) * velocity(x0, SCHEDULE.timesteps[0]))
    step = FlowSde().transition(
        x1, velocity(x1, SCHEDULE.timesteps[1]), SIGMAS[1], SIGMAS[2], sigma_max=SIGMAS[1], noise_level=0.7
    )
    torch.testing.assert_close(x2, step.mean + step.std * calls[1])


def test_stored_transitions_score_what_was_recorded() -> None:
    done = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowSde(), 0.7, debug=True)
    for k, step in enumerate(done.sde_steps):
        x, y = done.latents[:, step], done.latents[:, step + 1]
        assert torch.equal(done.model_outputs[:, k], velocity(x, SCHEDULE.timesteps[step]))
        transition = FlowSde().transition(
            x, done.model_outputs[:, k], SIGMAS[step], SIGMAS[step + 1], sigma_max=SIGMAS[1], noise_level=0.7
        )
        assert torch.equal(FlowSde().log_prob(y, transition), done.log_probs[:, k])


def test_the_last_step_of_cps_has_no_log_prob() -> None:
    done = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowCps(), 0.7, sde_steps=[2, 3])
    assert done.sde_steps == (2,)
    assert done.log_probs.isfinite().all()


def test_only_asked_latents_come_back() -> None:
    done = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowOde(), 0.7, return_steps=[4, 1])
    assert done.latent_indices == (1, 4)
    assert done.latents.shape[1] == 2
    nothing = denoise(velocity, NOISE, drawer(), SCHEDULE, FlowOde(), 0.7, return_steps=[])
    assert nothing.latents.shape == (2, 0, 3, 4)


def test_one_step_from_pure_noise_is_finite() -> None:
    schedule = Schedule(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    done = denoise(velocity, NOISE, drawer(), schedule, FlowSde(), 0.7)
    assert done.clean.isfinite().all()
    assert done.log_probs.isfinite().all()


@pytest.mark.parametrize("seeds", [[5, 6, 7], [7, 5]])
def test_noise_depends_on_the_sample_s_own_seed(seeds: list[int]) -> None:
    device = torch.device("cpu")
    drawn, generators = draw_noise((2, 3), seeds, "cpu", device)
    draw = step_noise_drawer((2, 3), generators, lambda x: x, device)
    first, second = draw(), draw()
    for row, seed in enumerate(seeds):
        alone = torch.Generator().manual_seed(seed)
        for got in (drawn, first, second):
            assert torch.equal(got[row], torch.randn(2, 3, generator=alone))
