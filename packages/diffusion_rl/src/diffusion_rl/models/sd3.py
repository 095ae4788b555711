"""Stable Diffusion 3 and 3.5: a joint-attention transformer over image and text, with a pooled text vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from diffusion_rl.models.family import ModelFamily, Schedule
from diffusion_rl.models.schedule import flow_schedule

if TYPE_CHECKING:
    from torch import Tensor

MAX_T5_LENGTH = 256


class SD3(ModelFamily):
    """`stabilityai/stable-diffusion-3.5-medium` and every checkpoint of that architecture."""

    name = "sd3"
    name_patterns = ("stable-diffusion-3", "sd3")
    pipeline_classes = ("StableDiffusion3Pipeline",)
    tasks = ("t2i",)
    components: ClassVar[tuple[str, ...]] = (
        "transformer",
        "scheduler",
        "vae",
        *("text_encoder", "text_encoder_2", "text_encoder_3"),
        *("tokenizer", "tokenizer_2", "tokenizer_3"),
    )
    condition_inputs = ("encoder_hidden_states", "pooled_projections")
    lora_target_modules: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    block_modules = ("JointTransformerBlock",)

    def vae_scale_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Every block of the VAE but the last halves the picture."""
        return 2 ** (len(vae_config["block_out_channels"]) - 1)

    def encode_prompts(self, pipeline: Any, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        """See :class:`ModelFamily`. Text longer than the tokenizers allow is cut off, as in diffusers."""
        prompts = list(prompts)
        length = MAX_T5_LENGTH
        if pipeline.tokenizer_3 is not None:
            length = min(length, pipeline.tokenizer_3.model_max_length)
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=prompts,
            prompt_2=prompts,
            prompt_3=prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return [
            {"encoder_hidden_states": text, "pooled_projections": vector}
            for text, vector in zip(embeds, pooled, strict=True)
        ]

    def noise_shape(self, in_channels: int, height: int, width: int, vae_scale_factor: int) -> tuple[int, ...]:
        """(C, H/8, W/8)."""
        return (in_channels, height // vae_scale_factor, width // vae_scale_factor)

    def decode(self, vae: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """See :class:`ModelFamily`."""
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return vae.decode(latents, return_dict=False)[0]

    def encode_images(self, vae: Any, images: Tensor) -> Tensor:
        """See :class:`ModelFamily`."""
        latents = vae.encode(images.to(vae.dtype), return_dict=False)[0].mode()
        return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    def schedule(self, scheduler: Any, num_steps: int, latents: Tensor, flow_shift: float | None = None) -> Schedule:
        """See :class:`ModelFamily`; a resolution-dependent shift counts patches of 2×2."""
        tokens = (latents.shape[-2] // 2) * (latents.shape[-1] // 2)
        return flow_schedule(scheduler, num_steps, flow_shift=flow_shift, image_seq_len=tokens)
