"""The tiny pipeline: it loads like any other, its encoders tell words apart, its autoencoder learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from transformers import AutoTokenizer

from diffusion_rl.models.registry import get_family
from diffusion_rl.presets.shapes import all_scenes
from diffusion_rl.presets.tiny import (
    EOS,
    VOCABULARY,
    build_transformer,
    build_vae,
    picture_tensor,
    pretrain_vae,
    standardize_latents,
    write_pipeline,
)


def test_the_directory_is_an_ordinary_pipeline(tiny_sd3_dir: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(tiny_sd3_dir)
    assert isinstance(pipeline, StableDiffusion3Pipeline)
    index = json.loads((tiny_sd3_dir / "model_index.json").read_text())
    assert set(get_family("sd3").components) <= set(index)
    assert [None, None] not in index.values()
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline("a red circle", num_inference_steps=2, height=64, width=64).images
    assert image.size == (64, 64)


def test_sizes_fit_together_as_engines_expect(tiny_sd3_dir: Path) -> None:
    read = {
        name: json.loads((tiny_sd3_dir / name / "config.json").read_text())
        for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae")
    }
    transformer, first, second, t5 = (
        read[name] for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
    )
    assert first["hidden_size"] + second["hidden_size"] <= t5["d_model"] == transformer["joint_attention_dim"]
    assert first["projection_dim"] + second["projection_dim"] == transformer["pooled_projection_dim"]
    assert len(read["vae"]["block_out_channels"]) == 4
    assert read["vae"]["latent_channels"] == transformer["in_channels"]
    assert first["max_position_embeddings"] == 77


def test_the_tokenizer_reads_every_caption(tiny_sd3_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_sd3_dir / "tokenizer")
    for scene in all_scenes():
        ids = tokenizer(scene.caption()).input_ids
        assert len(ids) == 10
        assert tokenizer.unk_token_id not in ids
        assert ids[-1] == tokenizer.eos_token_id == len(VOCABULARY) - 1 == VOCABULARY.index(EOS)
    assert tokenizer("Red").input_ids == tokenizer("red").input_ids
    assert tokenizer.unk_token_id in tokenizer("a purple cow").input_ids
    assert tokenizer(" ").input_ids == tokenizer("").input_ids


def test_every_word_changes_what_the_transformer_sees(tiny_sd3) -> None:
    base = "a small red circle at the top left"
    others = [base.replace(*pair) for pair in (("red", "blue"), ("circle", "square"), ("small", "large"))]
    first, *rest = get_family("sd3").encode_prompts(tiny_sd3, [base, *others])
    for name in ("encoder_hidden_states", "pooled_projections"):
        for other in rest:
            assert (first[name] - other[name]).norm() > 0.05 * first[name].norm()


def test_weights_come_from_the_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (build_transformer(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.proj_out.weight, same.proj_out.weight)
    assert not torch.equal(one.proj_out.weight, other.proj_out.weight)


def test_the_autoencoder_learns() -> None:
    errors: list[float] = []
    vae = build_vae()
    last = pretrain_vae(vae, num_steps=25, batch_size=4, progress=lambda step, error: errors.append(error))
    assert last == errors[-1]
    assert sum(errors[-5:]) < 0.5 * sum(errors[:5])
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_latents_are_standardised() -> None:
    vae, family, pictures = build_vae().eval().requires_grad_(False), get_family("sd3"), picture_tensor(64, 1)
    standardize_latents(vae, pictures)
    latents = family.encode_images(vae, pictures)
    assert latents.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert latents.std().item() == pytest.approx(1.0, abs=1e-3)


def test_the_name_must_say_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sd3\.5-medium"):
        write_pipeline(tmp_path / "tiny", vae_steps=0)
