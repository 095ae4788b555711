"""What a model family declares, and the few things it computes its own way. Imports no torch.

A family is a subclass of :class:`ModelFamily` in a file of its own, and one line in `registry.py`. Engine and trainer
call the same methods, so what the transformer sees is the same on both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

TensorConditions = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of one request.

    Attributes:
        scale: s in neg + s·(pos - neg).
        rescale: Bring the result back to the norm of the conditional branch.
    """

    scale: float
    rescale: bool = False

    @property
    def active(self) -> bool:
        """Whether the negative branch is computed at all."""
        return self.scale > 1.0


@dataclass(frozen=True)
class Schedule:
    """The noise levels of a request: `sigmas` (T+1,) with the final 0, `timesteps` (T,), float32 tensors."""

    sigmas: Tensor
    timesteps: Tensor


class ModelFamily(ABC):
    """One family of text-to-image or -video transformers.

    Attributes:
        name: Key of `--diffusion-model-family`.
        name_patterns: Parts of checkpoint names that mean this family, lower case; the longest match over all wins.
        pipeline_classes: `_class_name` of `model_index.json` that its checkpoints have.
        tasks: What `--diffusion-task` may say.
        components: Every module directory of a checkpoint that is needed.
        train_components: Those that train and are published, default of `--update-weight-target-module`.
        condition_inputs: Arguments of the transformer that a prompt's encoding gives.
        lora_target_modules: Suffixes of the layers that LoRA adapts by default.
        block_modules: Class names of the repeated blocks: the units of sharding and gradient checkpointing.
        input_dtype_policy: Dtype at the transformer's border for `latents`, `cond` and `timestep`: `"default"` (the
            run's forward dtype), `"fp32"`, `"bf16"`, `"fp16"`, or `None` for as it comes.
        param_dtype_patterns: Glob patterns of parameter names that keep a dtype of their own, later ones win.
        timestep_divisor: The transformer is told timestep / divisor.
        one_forward_guidance: Both branches of guidance go through the transformer as one batch.
    """

    name: ClassVar[str]
    name_patterns: ClassVar[tuple[str, ...]]
    pipeline_classes: ClassVar[tuple[str, ...]]
    tasks: ClassVar[tuple[str, ...]]
    components: ClassVar[tuple[str, ...]]
    train_components: ClassVar[tuple[str, ...]] = ("transformer",)
    condition_inputs: ClassVar[tuple[str, ...]]
    lora_target_modules: ClassVar[tuple[str, ...]]
    block_modules: ClassVar[tuple[str, ...]]
    input_dtype_policy: ClassVar[Mapping[str, str | None]] = {"latents": None, "cond": None, "timestep": None}
    param_dtype_patterns: ClassVar[Mapping[str, str]] = {}
    timestep_divisor: ClassVar[float] = 1.0
    one_forward_guidance: ClassVar[bool] = True

    def guidance(self, guidance_scale: float, true_cfg_scale: float | None = None) -> Guidance:
        """Guidance for `--diffusion-guidance-scale` and `--diffusion-true-cfg-scale`."""
        return Guidance(guidance_scale if true_cfg_scale is None else true_cfg_scale)

    def combine_guidance(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        """neg + s·(pos - neg)."""
        return negative + guidance.scale * (positive - negative)

    @abstractmethod
    def vae_scale_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Pixels a latent, from the VAE's `config.json`."""

    def size_multiple(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int:
        """What height and width must be multiples of."""
        return self.vae_scale_factor(vae_config) * int(transformer_config["patch_size"])

    def forward_arguments(self, height: int, width: int, batch_size: int, vae_scale_factor: int) -> dict[str, Any]:
        """Further arguments of the transformer, which depend on the picture's size only."""
        return {}

    @abstractmethod
    def encode_prompts(self, pipeline: Any, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        """`condition_inputs` of each prompt, without a batch axis."""

    def collate_conditions(self, conditions: Sequence[TensorConditions]) -> dict[str, Tensor]:
        """Conditions of single prompts as the transformer's arguments for a batch."""
        import torch

        return {name: torch.stack([entry[name] for entry in conditions]) for name in self.condition_inputs}

    @abstractmethod
    def noise_shape(self, in_channels: int, height: int, width: int, vae_scale_factor: int) -> tuple[int, ...]:
        """Shape of one sample's noise as it is drawn, without the batch axis."""

    def pack_latents(self, latents: Tensor) -> Tensor:
        """Drawn noise, or encoded images, to the transformer's own layout."""
        return latents

    @abstractmethod
    def decode(self, vae: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """Latents in the transformer's layout to pictures (B, 3, H, W) in about [-1, 1]."""

    @abstractmethod
    def encode_images(self, vae: Any, images: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [-1, 1] to latents in the transformer's layout: the mean, no draw."""

    @abstractmethod
    def schedule(self, scheduler: Any, num_steps: int, latents: Tensor, flow_shift: float | None = None) -> Schedule:
        """The noise levels that this family's pipeline takes for latents of that shape."""
