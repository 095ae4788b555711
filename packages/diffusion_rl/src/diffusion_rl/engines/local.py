"""The in-process engine: a diffusers pipeline's own components, driven step by step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion_rl.algorithms.step_dynamics import STEP_DYNAMICS, step_dynamics
from diffusion_rl.engines.denoise import Denoised, denoise, draw_noise, step_noise_drawer
from diffusion_rl.models.family import ModelFamily, Schedule
from diffusion_rl.models.forward import dtype_patterns, predict_velocity
from diffusion_rl.models.loading import ModelBackend, model_backend
from diffusion_rl.models.registry import resolve_family
from diffusion_rl.sample import EncodedPicture, GenerateOutput, GenerateRequest, Trajectory
from shared_runtime.engines.in_process import InProcessEngine
from shared_runtime.precision.overrides import cast_parameters
from shared_runtime.precision.policy import dtype_name, torch_dtype

MAX_CACHED_PROMPTS = 256
ENCODE_BATCH = 32


class RequestError(ValueError):
    """A request that can't be answered; the message names it."""


class LocalEngine(InProcessEngine):
    """An :class:`~shared_runtime.engines.contract.EngineWorker` around a diffusers pipeline.

    A request is one microgroup and one batch: its prompt is encoded once (and remembered, since the encoders never
    change), its images are denoised together. Requests never share a batch, so an image does not depend on what else
    is in flight, to the last bit.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        family: str | ModelFamily | None = None,
        backend: type[ModelBackend] | None = None,
        dtype: str = "fp32",
        encoder_dtype: str = "fp32",
        device: str = "cpu",
        generator_device: str = "cpu",
        train_components: tuple[str, ...] | None = None,
        param_dtype_patterns: Sequence[str] = (),
        weight_version: int = 0,
    ) -> None:
        """Load the pipeline.

        Args:
            model_dir: diffusers directory, or a name on the hub.
            family: A family or its name, default what the directory's name says.
            backend: Class that loads the pipeline, default diffusers' own loader.
            dtype: Of the trained components: weights, and autocast unless it is `fp32`.
            encoder_dtype: Of text encoders and VAE.
            device: Where it computes.
            generator_device: Where noise is drawn; the same device gives the same noise.
            train_components: The modules that updates overwrite, default the family's.
            param_dtype_patterns: `pattern=dtype`: parameters with a dtype of their own, after the family's.
            weight_version: Version of the weights in `model_dir`.

        Raises:
            FamilyError: If the family is not known, or the directory is not a complete pipeline of it.
            DtypeOverrideError: If a pattern matches no parameter.
        """
        self.family = resolve_family(str(model_dir), family)
        self.train_components = train_components or self.family.train_components
        self.forward_dtype = torch_dtype(dtype)
        self.device, self.generator_device = torch.device(device), generator_device
        patterns = dtype_patterns(self.family, param_dtype_patterns)
        self.pipeline = model_backend(backend).load_pipeline(
            str(model_dir),
            self.family,
            device=device,
            dtype=torch_dtype(encoder_dtype),
            component_dtypes=dict.fromkeys(self.train_components, torch.float32),
        )
        for component in self.train_components:
            # Not their buffers, such as position tables: the trainer has those in float32 too.
            cast_parameters(getattr(self.pipeline, component), patterns, self.forward_dtype)
        self.scale_factor = self.family.vae_scale_factor(self.pipeline.vae.config)
        self._encoded: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._start_receiving(weight_version)

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateOutput]:
        """Answer some microgroups, in order.

        Raises:
            RequestError: A size, a step or a count makes no sense for this model.
            RuntimeError: The engine is paused or asleep.
            WeightUpdateError: Its weights are those of an unfinished or failed update.
            FloatingPointError: An image has NaN or infinity; the message names its sample.
        """
        with self._serving():
            for request in requests:
                self._check(request)
            return [self._generate(request) for request in requests]

    def _check(self, request: GenerateRequest) -> None:
        params, count = request.params, request.num_outputs
        problems = []
        multiple = self.family.size_multiple(self.pipeline.vae.config, self.pipeline.transformer.config)
        if min(params.height, params.width) < multiple or params.height % multiple or params.width % multiple:
            problems.append(f"{params.height}x{params.width} pixels are no multiple of {multiple}")
        if count < 1 or len(request.sample_ids) not in (0, count):
            problems.append(f"{count} outputs for {len(request.sample_ids)} sample ids")
        if params.num_steps < 1:
            problems.append(f"num_steps must be at least 1, got {params.num_steps}")
        if params.sde_type not in STEP_DYNAMICS:
            problems.append(f"sde_type {params.sde_type!r} is none of {', '.join(STEP_DYNAMICS)}")
        if not 0.0 <= params.noise_level < float("inf"):
            problems.append(f"noise_level must be finite and not negative, got {params.noise_level}")
        for name, steps, end in (
            ("sde_steps", request.sde_steps, params.num_steps),
            ("return_steps", request.return_steps, params.num_steps + 1),
        ):
            if beyond := sorted(step for step in steps or () if not 0 <= step < end):
                problems.append(f"{name} {beyond} lie outside 0..{end - 1}")
        if problems:
            raise RequestError(f"request {request.request_id!r} can't be answered: {'; '.join(problems)}")

    def _generate(self, request: GenerateRequest) -> GenerateOutput:
        params, family, count = request.params, self.family, request.num_outputs
        guidance = family.guidance(params.guidance_scale, params.true_cfg_scale)
        conditions = self._encode(request.prompt)
        negative = None
        if guidance.active or params.return_negative_conditions:
            negative = self._encode(params.negative_prompt or "")

        in_channels = self.pipeline.transformer.config.in_channels
        shape = family.noise_shape(in_channels, params.height, params.width, self.scale_factor)
        seeds = [request.seed + k for k in range(count)]
        drawn, generators = draw_noise(shape, seeds, self.generator_device, self.device)
        noise = family.pack_latents(drawn)
        schedule = family.schedule(self.pipeline.scheduler, params.num_steps, noise, params.flow_shift)
        schedule = Schedule(schedule.sigmas.to(self.device), schedule.timesteps.to(self.device))

        batch = family.collate_conditions([conditions] * count)
        negative_batch = None if negative is None else family.collate_conditions([negative] * count)
        extra = family.forward_arguments(params.height, params.width, count, self.scale_factor)

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            return predict_velocity(
                family,
                self.pipeline.transformer,
                latents,
                timestep.expand(count),
                batch,
                negative_batch,
                guidance,
                extra=extra,
                forward_dtype=self.forward_dtype,
            )

        done = denoise(
            velocity,
            noise,
            step_noise_drawer(shape, generators, family.pack_latents, self.device),
            schedule,
            step_dynamics(params.sde_type),
            params.noise_level,
            sde_steps=request.sde_steps,
            return_steps=request.return_steps,
            constants=not params.log_prob_no_const,
            debug=params.debug,
        )
        decoded = family.decode(self.pipeline.vae, done.clean, params.height, params.width)
        _check_finite(decoded, request)
        images = (decoded.float() / 2.0 + 0.5).clamp(0.0, 1.0)
        return GenerateOutput(
            request_id=request.request_id,
            images=images.cpu().numpy(),
            trajectories=_trajectories(done, schedule),
            conditions=_to_numpy(conditions),
            negative_conditions=None if negative is None else _to_numpy(negative),
            weight_version=self.weight_version,
        )

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> list[EncodedPicture]:
        """Captions and pictures as supervised training wants them.

        Args:
            prompts: The captions.
            images: (3, H, W) in [0, 1] each, all of one size.

        Raises:
            RuntimeError: The engine is paused or asleep.
        """
        encoded: list[EncodedPicture] = []
        with self._serving():
            for start in range(0, len(prompts), ENCODE_BATCH):
                pixels = torch.from_numpy(np.stack(images[start : start + ENCODE_BATCH])).to(self.device)
                latents = self.family.encode_images(self.pipeline.vae, pixels * 2.0 - 1.0)
                encoded += [
                    EncodedPicture(_to_numpy(self._encode(prompt)), clean)
                    for prompt, clean in zip(prompts[start:], latents.float().cpu().numpy(), strict=False)
                ]
        return encoded

    def _encode(self, prompt: str) -> dict[str, Tensor]:
        """The prompt's conditions, without a batch axis."""
        if prompt in self._encoded:
            self._encoded.move_to_end(prompt)
            return self._encoded[prompt]
        (conditions,) = self.family.encode_prompts(self.pipeline, [prompt])
        self._encoded[prompt] = conditions
        if len(self._encoded) > MAX_CACHED_PROMPTS:
            self._encoded.popitem(last=False)
        return conditions

    def named_tensors(self) -> dict[str, Tensor]:
        """What an update overwrites: the parameters of the trained components, by diffusers name.

        With several trained components the component's name stands in front.
        """
        return published_parameters({name: getattr(self.pipeline, name) for name in self.train_components})

    def health(self) -> dict[str, Any]:
        """A small dict of facts; raises when the weights are unusable."""
        self._receiver.check_usable()
        return {
            "engine": "local",
            "model": str(self.pipeline.config._name_or_path),
            "family": self.family.name,
            "dtype": dtype_name(self.forward_dtype),
            "device": str(self.device),
            "num_parameters": sum(tensor.numel() for tensor in self.named_tensors().values()),
            "weight_version": self.weight_version,
            "paused": self._paused,
            "asleep": self._asleep,
        }

    def _move(self, device: torch.device) -> None:
        self.pipeline.to(device)
        self._encoded.clear()


def published_parameters(components: dict[str, torch.nn.Module]) -> dict[str, Tensor]:
    """Parameters by published name: diffusers' own for one component, with the component in front for several."""
    if len(components) == 1:
        (module,) = components.values()
        return dict(module.named_parameters())
    return {
        f"{component}.{name}": tensor
        for component, module in components.items()
        for name, tensor in module.named_parameters()
    }


def _trajectories(done: Denoised, schedule: Schedule) -> tuple[Trajectory, ...]:
    sigmas, timesteps = schedule.sigmas.cpu().numpy(), schedule.timesteps.cpu().numpy()
    latents, log_probs = done.latents.cpu().numpy(), done.log_probs.cpu().numpy()
    outputs = None if done.model_outputs is None else done.model_outputs.cpu().numpy()
    return tuple(
        Trajectory(
            sigmas=sigmas,
            timesteps=timesteps,
            latents=latents[k],
            latent_indices=done.latent_indices,
            sde_steps=done.sde_steps,
            log_probs=log_probs[k],
            model_outputs=None if outputs is None else outputs[k],
        )
        for k in range(len(latents))
    )


def _to_numpy(conditions: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """float32 holds every narrower dtype exactly, and numpy lacks bfloat16."""
    return {
        name: (value.float() if value.is_floating_point() else value).cpu().numpy()
        for name, value in conditions.items()
    }


def _check_finite(images: Tensor, request: GenerateRequest) -> None:
    finite = images.isfinite().flatten(1).all(dim=1)
    if bool(finite.all()):
        return
    broken = [k for k, good in enumerate(finite.tolist()) if not good]
    names = [f"sample {request.sample_ids[k]}" if request.sample_ids else f"image {k}" for k in broken]
    raise FloatingPointError(
        f"{', '.join(names)} of request {request.request_id} (prompt {request.prompt!r}, seeds "
        f"{[request.seed + k for k in broken]}) came out as NaN: the weights are broken, or "
        "--diffusion-forward-dtype is too narrow for this model"
    )
