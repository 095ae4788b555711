"""Tiny pipelines, built once a session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers that lie beside this file


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained `tiny` preset as a diffusers directory. Don't write into it."""
    from diffusion_rl.presets.tiny import DIRECTORY_NAME, write_pipeline

    return write_pipeline(tmp_path_factory.mktemp("sd3") / DIRECTORY_NAME, vae_steps=0)


@pytest.fixture
def tiny_sd3(tiny_sd3_dir: Path) -> Any:
    """A fresh pipeline of it."""
    from diffusion_rl.models.loading import load_pipeline
    from diffusion_rl.models.registry import get_family

    return load_pipeline(str(tiny_sd3_dir), get_family("sd3"))


@pytest.fixture(scope="session")
def tiny_qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen-Image pipeline: 2 layers, latents of 4 channels packed to 16, 64×64 pixels to 4×4 tokens."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    words = ["<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    text_config = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    vision_config = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=1.0, shift_terminal=0.02),
        vae=AutoencoderKLQwenImage(
            base_dim=12,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config)
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="right"
        ),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    directory = tmp_path_factory.mktemp("qwen") / "tiny-qwen-image"
    pipeline.save_pretrained(directory)
    return directory


@pytest.fixture
def tiny_qwen(tiny_qwen_dir: Path) -> Any:
    """A fresh pipeline of it."""
    from diffusion_rl.models.loading import load_pipeline
    from diffusion_rl.models.registry import get_family

    return load_pipeline(str(tiny_qwen_dir), get_family("qwen_image"))
