"""The diffusion model's sample, its trajectory, and the messages between rollout and engine. Imports no torch.

Tensors travel as numpy arrays: they cross process borders through shared memory without a copy. Latents, noise levels
and log-probs are float32 and exactly what the engine computed with, so that a stored transition scores the same later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared_runtime.sample import BaseSample

Conditions = Mapping[str, np.ndarray]
"""What the transformer is conditioned on, by the name of its argument, without the batch axis."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """How one image came out of noise, over T steps.

    Attributes:
        sigmas: (T+1,), the noise levels, the final 0 included.
        timesteps: (T,), what the transformer was told, before the family's scaling.
        latents: (S, ...), the latents at `latent_indices`.
        latent_indices: S numbers in 0..T, ascending; 0 is the noise, T the clean result.
        sde_steps: K numbers in 0..T-1, ascending: the steps that had noise, and so a log-prob.
        log_probs: (K,), one a step of `sde_steps`.
        model_outputs: (K, ...), the guided velocity of those steps, when the request asked for debug tensors.
    """

    sigmas: np.ndarray
    timesteps: np.ndarray
    latents: np.ndarray
    latent_indices: tuple[int, ...]
    sde_steps: tuple[int, ...]
    log_probs: np.ndarray
    model_outputs: np.ndarray | None = None

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.timesteps)

    @property
    def clean(self) -> np.ndarray:
        """The latents after the last step.

        Raises:
            KeyError: If they were not returned.
        """
        return self.latent(self.num_steps)

    def latent(self, index: int) -> np.ndarray:
        """The latents at one of 0..T.

        Raises:
            KeyError: If they were not returned.
        """
        if index not in self.latent_indices:
            raise KeyError(f"the engine did not return latents {index}, only {list(self.latent_indices)}")
        return self.latents[self.latent_indices.index(index)]


@dataclass
class Sample(BaseSample):
    """A prompt and one image.

    Attributes:
        seed: What the noise was drawn from.
        generated_output: (3, H, W) float32 in [0, 1].
        trajectory: How it came about.
        conditions: What the transformer saw of the prompt.
        negative_conditions: What it saw of the negative prompt; needed where training uses guidance.
    """

    seed: int | None = None
    generated_output: np.ndarray | None = None
    trajectory: Trajectory | None = None
    conditions: Conditions | None = None
    negative_conditions: Conditions | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How to denoise.

    Attributes:
        num_steps: T (`--diffusion-num-steps`).
        height: Pixels.
        width: Pixels.
        guidance_scale: Classifier-free guidance; 1 or less switches it off.
        true_cfg_scale: Takes its place in families that have one (Qwen-Image).
        negative_prompt: `None` is the empty prompt.
        sde_type: `sde`, `cps` or `ode`.
        noise_level: η.
        flow_shift: Shift of the schedule, default the checkpoint's.
        log_prob_no_const: Log-probs without constants.
        return_negative_conditions: Return them even where sampling has no guidance, since training may have it.
        debug: Return the model's outputs at stochastic steps.
    """

    num_steps: int = 10
    height: int = 512
    width: int = 512
    guidance_scale: float = 4.0
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    sde_type: str = "sde"
    noise_level: float = 0.7
    flow_shift: float | None = None
    log_prob_no_const: bool = False
    return_negative_conditions: bool = False
    debug: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One microgroup: one prompt, several images. Image k uses `seed + k`.

    Attributes:
        request_id: Comes back with the output.
        prompt: Encoded once.
        num_outputs: M.
        seed: Of the first image; see :func:`request_seed`.
        params: How to denoise.
        sde_steps: The stochastic steps, the others follow the ODE; `None` makes every step follow `sde_type`.
        return_steps: The latents to return, `None` returns all.
        sample_ids: Global ids, for messages.
    """

    request_id: str
    prompt: str
    num_outputs: int
    seed: int
    params: SamplingParams
    sde_steps: tuple[int, ...] | None = None
    return_steps: tuple[int, ...] | None = None
    sample_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class GenerateOutput:
    """One answer.

    Attributes:
        request_id: The request's own id.
        images: (M, 3, H, W) float32 in [0, 1].
        trajectories: M of them.
        conditions: Of the prompt, one for all M.
        negative_conditions: Of the negative prompt, when guided or asked for.
        weight_version: Version of the weights that drew them.
    """

    request_id: str
    images: np.ndarray
    trajectories: tuple[Trajectory, ...]
    conditions: Conditions
    negative_conditions: Conditions | None
    weight_version: int


def request_seed(rollout_seed: int, group_index: int, n_samples_per_prompt: int, start: int = 0) -> int:
    """(rollout_seed + group_index·n) mod 2³¹ + index of the request's first sample in its group.

    Samples of a run get different seeds, whatever the microgroup size, until the base wraps at 2³¹.
    """
    return (rollout_seed + group_index * n_samples_per_prompt) % 2**31 + start


def fill_samples(samples: Sequence[Sample], request: GenerateRequest, output: GenerateOutput) -> None:
    """Write an answer into the samples it was made for, in order.

    Raises:
        ValueError: If the answer belongs to another request or has another number of images.
    """
    if output.request_id != request.request_id or not len(samples) == len(output.images) == len(output.trajectories):
        raise ValueError(
            f"answer {output.request_id!r} with {len(output.images)} images does not fit request "
            f"{request.request_id!r} for {len(samples)} samples"
        )
    for k, sample in enumerate(samples):
        sample.seed = request.seed + k
        sample.generated_output = output.images[k]
        sample.trajectory = output.trajectories[k]
        sample.conditions = output.conditions
        sample.negative_conditions = output.negative_conditions
        sample.weight_version_returned = output.weight_version


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """A captioned picture as the transformer trains on it.

    Attributes:
        conditions: Of its caption.
        clean: (...), its latents, without noise.
    """

    conditions: Conditions
    clean: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.clean.nbytes + sum(value.nbytes for value in self.conditions.values())
