"""Qwen-Image: a dual-stream transformer over packed latents, with text of variable length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from diffusion_rl.models.family import Guidance, ModelFamily, Schedule, TensorConditions
from diffusion_rl.models.schedule import flow_schedule

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 2


class QwenImage(ModelFamily):
    """`Qwen/Qwen-Image`. Its latents are packed 2×2: (tokens, 4·channels)."""

    name = "qwen_image"
    name_patterns = ("qwen-image",)
    pipeline_classes = ("QwenImagePipeline",)
    tasks = ("t2i",)
    components: ClassVar[tuple[str, ...]] = ("transformer", "scheduler", "vae", "text_encoder", "tokenizer")
    condition_inputs = ("encoder_hidden_states",)
    lora_target_modules: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
    block_modules = ("QwenImageTransformerBlock",)
    timestep_divisor = 1000.0
    # The two texts differ in length, so their branches are no one batch.
    one_forward_guidance = False

    def guidance(self, guidance_scale: float, true_cfg_scale: float | None = None) -> Guidance:
        """The true guidance scale, when given, also rescales to the norm of the conditional branch."""
        if true_cfg_scale is None:
            return Guidance(guidance_scale)
        return Guidance(true_cfg_scale, rescale=true_cfg_scale > 1.0)

    def combine_guidance(self, positive: Tensor, negative: Tensor, guidance: Guidance) -> Tensor:
        """neg + s·(pos - neg), each token brought back to the conditional one's norm where `rescale`."""
        combined = super().combine_guidance(positive, negative, guidance)
        if not guidance.rescale:
            return combined
        return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def vae_scale_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Each downsampling stage of the VAE halves the picture."""
        return 2 ** len(vae_config["temperal_downsample"])

    def size_multiple(self, vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> int:
        """Twice the VAE's factor: latents are packed 2×2."""
        return self.vae_scale_factor(vae_config) * PATCH

    def forward_arguments(self, height: int, width: int, batch_size: int, vae_scale_factor: int) -> dict[str, Any]:
        """`img_shapes`, one (frames, rows, columns) of tokens a sample."""
        factor = vae_scale_factor * PATCH
        return {"img_shapes": [[(1, height // factor, width // factor)]] * batch_size}

    def encode_prompts(self, pipeline: Any, prompts: Sequence[str]) -> list[dict[str, Tensor]]:
        """See :class:`ModelFamily`; each prompt at its own length."""
        embeds, mask = pipeline.encode_prompt(prompt=list(prompts))
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(dim=1).tolist()
        return [{"encoder_hidden_states": text[:length]} for text, length in zip(embeds, lengths, strict=True)]

    def collate_conditions(self, conditions: Sequence[TensorConditions]) -> dict[str, Tensor]:
        """Pad to the longest text of the batch; with a mask, 1 at tokens, unless all are equally long."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        texts = [entry["encoder_hidden_states"] for entry in conditions]
        padded = pad_sequence(texts, batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        if bool((lengths == padded.shape[1]).all()):
            return {"encoder_hidden_states": padded}
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return {"encoder_hidden_states": padded, "encoder_hidden_states_mask": mask.to(padded.device)}

    def noise_shape(self, in_channels: int, height: int, width: int, vae_scale_factor: int) -> tuple[int, ...]:
        """(1, C, H/8, W/8): noise is drawn unpacked."""
        return (1, in_channels // PATCH**2, height // vae_scale_factor, width // vae_scale_factor)

    def pack_latents(self, latents: Tensor) -> Tensor:
        """(B, 1, C, h, w) to (B, h/2·w/2, 4C)."""
        batch, _, channels, height, width = latents.shape
        latents = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return latents.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)

    def decode(self, vae: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """See :class:`ModelFamily`."""
        factor = self.vae_scale_factor(vae.config)
        rows, columns = height // factor, width // factor
        batch, _, packed = latents.shape
        latents = latents.view(batch, rows // PATCH, columns // PATCH, packed // PATCH**2, PATCH, PATCH)
        latents = latents.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, 1, rows, columns).to(vae.dtype)
        mean, std = self._latent_statistics(vae, latents)
        # Divided by the reciprocal, as the pipeline does, to stay bit-equal to it.
        return vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]

    def encode_images(self, vae: Any, images: Tensor) -> Tensor:
        """See :class:`ModelFamily`."""
        latents = vae.encode(images.to(vae.dtype).unsqueeze(2), return_dict=False)[0].mode()
        mean, std = self._latent_statistics(vae, latents)
        return self.pack_latents(((latents - mean) / std).transpose(1, 2))

    def schedule(self, scheduler: Any, num_steps: int, latents: Tensor, flow_shift: float | None = None) -> Schedule:
        """Sigmas from 1 to 1/T, shifted by the number of packed tokens."""
        sigmas = np.linspace(1.0, 1.0 / num_steps, num_steps)
        return flow_schedule(scheduler, num_steps, flow_shift=flow_shift, image_seq_len=latents.shape[1], sigmas=sigmas)

    @staticmethod
    def _latent_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = like.new_tensor(vae.config.latents_mean).view(shape)
        return mean, like.new_tensor(vae.config.latents_std).view(shape)
