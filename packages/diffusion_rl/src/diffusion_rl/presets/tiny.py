"""The `tiny` preset: a complete SD3-architecture pipeline that learns coloured shapes in minutes on two cores.

Nothing is downloaded: text encoders are drawn from a seed (and stay as they are, as in every RL run), the autoencoder
is pretrained here, and the transformer starts untrained. The directory loads in diffusers like any other checkpoint.
Its name has `sd3.5-medium` in it, from which engines tell the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_rl.presets.shapes import IMAGE_SIZE, WORDS, captioned_pictures

if TYPE_CHECKING:
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5EncoderModel

DIRECTORY_NAME = "tiny-sd3.5-medium"

PAD, BOS, UNKNOWN, EOS = "<pad>", "<bos>", "<unk>", "<eos>"
# CLIP takes the pooled vector at the highest id, so the end of sequence comes last.
VOCABULARY: tuple[str, ...] = (PAD, BOS, UNKNOWN, *WORDS, EOS)
TEXT_LENGTH = 12
"""Tokens a text encoder gives: eight words, the two ends, and two to spare. The transformer's cost grows with it."""

CLIP_POSITIONS = 77
CLIP_WIDTH = 32
T5_WIDTH = 64
LATENT_CHANNELS = 4
"""A quarter of SD3's: five words describe a picture, and fewer latents are learned sooner and drawn cleaner."""

Progress = Callable[[int, float], None]
"""Called with the step and the loss."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, between `<bos>` and `<eos>`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, ids[BOS]), (EOS, ids[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=TEXT_LENGTH,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def build_clip(seed: int) -> CLIPTextModelWithProjection:
    """A CLIP text encoder, hidden 32, 2 layers, drawn wide enough that every word leaves its mark on the output."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=CLIP_POSITIONS,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPTextModelWithProjection(config)
        # transformers draws CLIP for training, all but zero: untrained, it would tell no word from another.
        for name, parameter in model.named_parameters():
            if "token_embedding" in name:
                torch.nn.init.normal_(parameter)
            elif "position_embedding" in name:
                torch.nn.init.normal_(parameter, std=0.5)
            elif parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def build_t5(seed: int) -> T5EncoderModel:
    """A T5 encoder, width 64, 1 layer, gated GELU."""
    import torch
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=2 * T5_WIDTH,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        is_encoder_decoder=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5EncoderModel(config)
    return model.eval().requires_grad_(False)


def build_vae(seed: int = 0) -> Any:
    """An autoencoder of 0.27 M parameters, untrained: 64×64 pixels to 8×8 latents of 4 channels."""
    import torch
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 16, 32, 32),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=IMAGE_SIZE,
            scaling_factor=1.0,
            shift_factor=0.0,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


def build_transformer(seed: int = 0) -> SD3Transformer2DModel:
    """The transformer, untrained: 3 layers, 4 heads of 32, a token for 2×2 latents, 1.7 M parameters."""
    import torch
    from diffusers import SD3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SD3Transformer2DModel(
            sample_size=IMAGE_SIZE // 8,
            patch_size=2,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=3,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=2 * CLIP_WIDTH,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with shift 3, as SD3."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def pretrain_vae(
    vae: Any,
    *,
    num_steps: int = 600,
    batch_size: int = 8,
    lr: float = 2e-3,
    kl_weight: float = 1e-5,
    seed: int = 0,
    progress: Progress | None = None,
) -> float:
    """Train the autoencoder on drawn pictures, in place, then set its scaling and shift so that latents have std 1.

    Args:
        vae: As :func:`build_vae` gives it.
        num_steps: AdamW steps, the rate falls to zero along a cosine.
        batch_size: Pictures a step.
        lr: Rate at the start.
        kl_weight: Of the latents' divergence from the standard normal.
        seed: Of pictures and latent noise.
        progress: Called after every step.

    Returns:
        Mean squared error of the last step, pictures in [-1, 1].
    """
    import torch

    pictures = picture_tensor(max(1024, 4 * batch_size), seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    vae.train().requires_grad_(True)
    error = torch.tensor(float("nan"))
    for step in range(num_steps):
        batch = pictures[torch.randint(len(pictures), (batch_size,), generator=generator)]
        posterior = vae.encode(batch).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample
        error = (decoded - batch).square().mean()
        loss = error + kl_weight * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step, error.item())
    vae.eval().requires_grad_(False)
    standardize_latents(vae, pictures[:256])
    return error.item()


def standardize_latents(vae: Any, pictures: torch.Tensor) -> None:
    """Set `shift_factor` and `scaling_factor` so that the latents of these pictures have mean 0 and std 1."""
    import torch

    with torch.no_grad():
        latents = torch.cat([vae.encode(chunk).latent_dist.mode() for chunk in pictures.split(64)])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1.0 / latents.std().item())


def picture_tensor(count: int, seed: int) -> torch.Tensor:
    """Drawn pictures, (count, 3, 64, 64) in [-1, 1]."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([picture for _, picture in captioned_pictures(count, seed)])) * 2.0 - 1.0


def write_pipeline(
    directory: Path,
    *,
    seed: int = 0,
    vae_steps: int = 600,
    transformer: SD3Transformer2DModel | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the whole pipeline as a diffusers directory; a name without `sd3.5-medium` in it is an error.

    Args:
        directory: For example `.../tiny-sd3.5-medium`.
        seed: Of every weight.
        vae_steps: Steps of :func:`pretrain_vae`; 0 leaves the autoencoder untrained.
        transformer: Default: untrained.
        progress: Of the autoencoder's pretraining.

    Returns:
        The directory.

    Raises:
        ValueError: If the directory's name doesn't say what it holds.
    """
    from diffusers import StableDiffusion3Pipeline

    if "sd3.5-medium" not in directory.name:
        raise ValueError(f"{directory}: the directory's name must contain sd3.5-medium, engines tell the model from it")
    vae = build_vae(seed)
    if vae_steps > 0:
        pretrain_vae(vae, num_steps=vae_steps, seed=seed, progress=progress)
    tokenizer: Any = build_tokenizer()
    pipeline: Any = StableDiffusion3Pipeline(
        transformer=transformer or build_transformer(seed),
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=build_clip(seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=build_clip(seed + 2),
        tokenizer_2=tokenizer,
        text_encoder_3=build_t5(seed + 3),
        tokenizer_3=tokenizer,
    )
    pipeline.save_pretrained(directory)
    _drop_absent_components(directory)
    return directory


def _drop_absent_components(directory: Path) -> None:
    """Leave optional components out of `model_index.json` altogether; loaders differ in what they make of nulls."""
    path = directory / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in index.items() if value != [None, None]}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
