"""From noise to clean latents, recording what training needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_rl.algorithms.step_dynamics import FlowOde, StepDynamics
from diffusion_rl.models.family import Schedule


@dataclass(frozen=True, eq=False)
class Denoised:
    """A batch of trajectories.

    Attributes:
        clean: (B, ...), after the last step.
        latents: (B, S, ...), at the indices that were asked for, ascending.
        latent_indices: S numbers in 0..T.
        sde_steps: The K steps that had noise.
        log_probs: (B, K).
        model_outputs: (B, K, ...) or `None`.
    """

    clean: Tensor
    latents: Tensor
    latent_indices: tuple[int, ...]
    sde_steps: tuple[int, ...]
    log_probs: Tensor
    model_outputs: Tensor | None


def draw_noise(
    shape: Sequence[int], seeds: Sequence[int], generator_device: str, device: torch.device
) -> tuple[Tensor, list[torch.Generator]]:
    """Initial noise, one generator a sample, which then also draws the noise of that sample's steps.

    A sample's noise depends on its seed and the step alone, never on what else is in the batch.

    Returns:
        (B, *shape) float32 on `device`, and the generators.
    """
    generators = [torch.Generator(generator_device).manual_seed(seed) for seed in seeds]
    return _draw(shape, generators, device), generators


def denoise(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    draw_step_noise: Callable[[], Tensor],
    schedule: Schedule,
    dynamics: StepDynamics,
    noise_level: float,
    *,
    sde_steps: Collection[int] | None = None,
    return_steps: Collection[int] | None = None,
    constants: bool = True,
    debug: bool = False,
) -> Denoised:
    """Take the T steps of a schedule.

    Latents stay in float32 from step to step: what is stored is what the next step, and its log-prob, used.

    Args:
        velocity: Latents (B, ...) and timestep () to the guided velocity (B, ...).
        noise: (B, ...), float32.
        draw_step_noise: Standard normal (B, ...); called once a step, used or not, so that the noise of a step does
            not depend on which other steps are stochastic. Not called where no step is.
        schedule: Noise levels.
        dynamics: Of the stochastic steps.
        noise_level: η.
        sde_steps: Steps that follow `dynamics`, `None` all; the others follow the ODE.
        return_steps: Latents to record, 0 the noise, T the clean ones; `None` all.
        constants: Log-probs with constants.
        debug: Record the velocity of the stochastic steps.
    """
    sigmas = schedule.sigmas
    levels = sigmas.tolist()
    num_steps = len(levels) - 1
    chosen = range(num_steps) if sde_steps is None else sorted(sde_steps)
    stochastic = tuple(step for step in chosen if dynamics.stochastic(levels[step + 1], noise_level))
    recorded = tuple(range(num_steps + 1)) if return_steps is None else tuple(sorted(return_steps))
    ode = FlowOde()
    latents, kept, log_probs, outputs = noise, [], [], []
    for step in range(num_steps):
        if step in recorded:
            kept.append(latents)
        output = velocity(latents, schedule.timesteps[step])
        noisy = step in stochastic
        transition = (dynamics if noisy else ode).transition(
            latents, output, sigmas[step], sigmas[step + 1], sigma_max=sigmas[1], noise_level=noise_level
        )
        step_noise = draw_step_noise() if stochastic else None
        latents = transition.mean
        if noisy and step_noise is not None:
            latents = transition.sample(step_noise)
            log_probs.append(dynamics.log_prob(latents, transition, constants=constants))
            if debug:
                outputs.append(output.float())
    if num_steps in recorded:
        kept.append(latents)
    return Denoised(
        clean=latents,
        latents=torch.stack(kept, dim=1) if kept else noise[:, None][:, :0],
        latent_indices=recorded,
        sde_steps=stochastic,
        log_probs=torch.stack(log_probs, dim=1) if log_probs else noise.new_zeros((noise.shape[0], 0)),
        model_outputs=torch.stack(outputs, dim=1) if outputs else None,
    )


def step_noise_drawer(
    shape: Sequence[int], generators: Sequence[torch.Generator], pack: Callable[[Tensor], Tensor], device: torch.device
) -> Callable[[], Tensor]:
    """What :func:`denoise` draws with: noise of `shape` a sample, in the transformer's layout."""
    return lambda: pack(_draw(shape, generators, device))


def _draw(shape: Sequence[int], generators: Sequence[torch.Generator], device: torch.device) -> Tensor:
    drawn = [torch.randn(tuple(shape), generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return torch.stack(drawn).to(device)
