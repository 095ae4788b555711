"""How one denoising step goes from σ to σ': `sde` (Flow-GRPO), `cps` (coefficients preserving sampling) and `ode`.

A step is a Gaussian N(mean, std²) over the next latents; `ode` has std 0. The engine draws from it and the trainer
scores what was drawn, both through :meth:`StepDynamics.transition` and :meth:`StepDynamics.log_prob`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diffusion_rl.algorithms.shapes import at_least_float32, latent_mean, per_sample

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class Transition:
    """The distribution of the next latents.

    Attributes:
        mean: (B, ...), float32 or wider.
        std: (B, 1, ..., 1) or (), the noise's standard deviation, √(-dt) included.
    """

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """Next latents for standard normal `noise`, (B, ...)."""
        return self.mean + self.std * noise.to(self.mean.dtype)


class StepDynamics(Protocol):
    """What `--diffusion-sde-type` chooses, and what a class given to `--sde-step-backend-path` must have."""

    name: str

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        next_sigma: Tensor,
        *,
        sigma_max: Tensor,
        noise_level: float,
    ) -> Transition:
        """The distribution of the next latents.

        Args:
            latents: (B, ...), at `sigma`.
            velocity: (B, ...), the model's (guided) output.
            sigma: (B,) or ().
            next_sigma: (B,) or (), smaller than `sigma`.
            sigma_max: (B,) or (), the second σ of the sample's grid; stands in for σ = 1 where a formula diverges.
            noise_level: η.
        """

    def log_prob(self, next_latents: Tensor, transition: Transition, *, constants: bool = True) -> Tensor:
        """Log-density of `next_latents`, mean (not sum) over the latent dimensions: (B,).

        Args:
            next_latents: (B, ...).
            transition: What :meth:`transition` gave.
            constants: Keep the normalisation and the scale 1/(2·std²); without them it is -mean((y - mean)²).
        """

    def stochastic(self, next_sigma: float, noise_level: float) -> bool:
        """Whether the step to `next_sigma` has noise, and so a log-prob."""


class FlowSde:
    """`sde`: the SDE with the marginals of the flow's ODE.

    s = η·√(σ/(1-σ̃)) with σ̃ = σ, or `sigma_max` where σ = 1; mean = x·(1 + s²dt/(2σ)) + v·(1 + s²(1-σ)/(2σ))·dt;
    std = s·√(-dt). Noise level 0 is the ODE, bit for bit.

    Paper: Flow-GRPO, arXiv:2505.05470.
    """

    name = "sde"

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        next_sigma: Tensor,
        *,
        sigma_max: Tensor,
        noise_level: float,
    ) -> Transition:
        """See :class:`StepDynamics`."""
        latents, velocity, sigma, next_sigma, sigma_max = at_least_float32(
            latents, velocity, sigma, next_sigma, sigma_max
        )
        sigma, next_sigma, sigma_max = (per_sample(value, latents) for value in (sigma, next_sigma, sigma_max))
        dt = next_sigma - sigma
        bounded = torch.where(torch.isclose(sigma, torch.ones_like(sigma)), sigma_max, sigma)
        scale = noise_level * torch.sqrt(sigma / (1.0 - bounded))
        variance_rate = scale**2 / (2.0 * sigma)
        mean = latents * (1.0 + variance_rate * dt) + velocity * (1.0 + variance_rate * (1.0 - sigma)) * dt
        return Transition(mean, scale * torch.sqrt(-dt))

    def log_prob(self, next_latents: Tensor, transition: Transition, *, constants: bool = True) -> Tensor:
        """See :class:`StepDynamics`."""
        return gaussian_log_prob(next_latents, transition, constants=constants)

    def stochastic(self, next_sigma: float, noise_level: float) -> bool:
        """See :class:`StepDynamics`."""
        return noise_level > 0.0


class FlowCps:
    """`cps`: noise of exactly the amount that the schedule removes, so that the latents keep their variance.

    std = σ'·sin(ηπ/2); x̂₀ = x - σv, x̂₁ = x + (1-σ)v; mean = (1-σ')·x̂₀ + √(σ'² - std²)·x̂₁. The log-prob is always
    -mean((y - mean)²). The last step (σ' = 0) has no noise, and so no log-prob.

    Paper: Coefficients-Preserving Sampling, arXiv:2509.05952.
    """

    name = "cps"

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        next_sigma: Tensor,
        *,
        sigma_max: Tensor,
        noise_level: float,
    ) -> Transition:
        """See :class:`StepDynamics`."""
        latents, velocity, sigma, next_sigma = at_least_float32(latents, velocity, sigma, next_sigma)
        sigma, next_sigma = per_sample(sigma, latents), per_sample(next_sigma, latents)
        std = next_sigma * math.sin(noise_level * math.pi / 2.0)
        clean = latents - sigma * velocity
        noise = latents + (1.0 - sigma) * velocity
        mean = (1.0 - next_sigma) * clean + torch.sqrt(next_sigma**2 - std**2) * noise
        return Transition(mean, std)

    def log_prob(self, next_latents: Tensor, transition: Transition, *, constants: bool = True) -> Tensor:
        """See :class:`StepDynamics`; `constants` makes no difference."""
        return gaussian_log_prob(next_latents, transition, constants=False)

    def stochastic(self, next_sigma: float, noise_level: float) -> bool:
        """See :class:`StepDynamics`."""
        return noise_level > 0.0 and next_sigma > 0.0


class FlowOde:
    """`ode`: x + v·dt, as diffusers' Euler step; no noise and no log-prob."""

    name = "ode"

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        next_sigma: Tensor,
        *,
        sigma_max: Tensor,
        noise_level: float,
    ) -> Transition:
        """See :class:`StepDynamics`."""
        latents, velocity, sigma, next_sigma = at_least_float32(latents, velocity, sigma, next_sigma)
        dt = per_sample(next_sigma, latents) - per_sample(sigma, latents)
        return Transition(latents + dt * velocity, torch.zeros_like(dt))

    def log_prob(self, next_latents: Tensor, transition: Transition, *, constants: bool = True) -> Tensor:
        """A deterministic step has no density.

        Raises:
            ValueError: Always.
        """
        raise ValueError("--diffusion-sde-type ode has no log-probs: use sde or cps, or --loss-type nft")

    def stochastic(self, next_sigma: float, noise_level: float) -> bool:
        """Never."""
        return False


def gaussian_log_prob(values: Tensor, transition: Transition, *, constants: bool = True) -> Tensor:
    """Mean over latent dimensions of log N(values; mean, std²); without `constants`, of -(values - mean)².

    Args:
        values: (B, ...); carries no gradient, it is data.
        transition: mean (B, ...), std > 0 where `constants`.
        constants: See :meth:`StepDynamics.log_prob`.

    Returns:
        (B,), float32 or wider.
    """
    error = -((values.detach().to(transition.mean.dtype) - transition.mean) ** 2)
    if not constants:
        return latent_mean(error)
    return latent_mean(error / (2.0 * transition.std**2) - torch.log(transition.std) - _LOG_SQRT_2PI)


STEP_DYNAMICS: dict[str, type] = {dynamics.name: dynamics for dynamics in (FlowSde, FlowCps, FlowOde)}


def step_dynamics(name: str) -> StepDynamics:
    """The dynamics of a name.

    Raises:
        ValueError: For an unknown name; the message lists the known ones.
    """
    if name not in STEP_DYNAMICS:
        raise ValueError(f"--diffusion-sde-type {name!r} is not known: choose from {', '.join(STEP_DYNAMICS)}")
    return STEP_DYNAMICS[name]()
