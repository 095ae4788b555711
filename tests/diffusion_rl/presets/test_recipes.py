"""The default recipe: its warm-up gives a pipeline that its run accepts, and the model learns from pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffusion_rl.config import resolve
from diffusion_rl.models.loading import load_component
from diffusion_rl.models.registry import get_family
from diffusion_rl.preflight import preflight
from diffusion_rl.presets.recipes import tiny_grpo, tiny_nft
from diffusion_rl.presets.shapes import write_prompts
from diffusion_rl.presets.tiny import build_transformer
from diffusion_rl.presets.warmup import warm_up
from shared_runtime.cache import built_once


def test_the_recipe_accepts_what_its_warm_up_makes(tmp_path: Path) -> None:
    preset = tiny_grpo(tmp_path)
    model = preset.config.model.hf_checkpoint
    assert model is not None
    lines: list[str] = []

    def build(staging: Path) -> None:
        few = {"vae_steps": 0, "num_steps": 12, "batch_size": 8, "num_pictures": 16, "wrong_words": 0.0}
        # Velocities of unit noise and unit latents start at an error of about 2.
        assert warm_up(staging, report=lines.append, **few) < 1.9  # type: ignore[arg-type]

    built_once(model, build)
    built_once(model.parent / "shapes", write_prompts)
    preset.prepare(False)  # nothing is made anew
    preflight(resolve(tiny_nft(tmp_path).config))
    prepared = preflight(resolve(preset.config))
    assert prepared.config.batch.num_rollout == preset.config.batch.num_rollout
    trained = load_component(str(model), get_family("sd3"), "transformer", dtype=torch.float32)
    moved = [
        name
        for (name, after), before in zip(trained.named_parameters(), build_transformer(0).parameters(), strict=True)
        if not torch.equal(after, before)
    ]
    assert len(moved) > 50


def test_the_warm_up_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import diffusion_rl.presets.warmup as module

    lines: list[str] = []
    monkeypatch.setattr(module, "STEPS_A_CALL", 100)
    module.warm_up(
        tmp_path / "sd3.5-medium",
        vae_steps=0,
        num_steps=100,
        batch_size=1,
        num_pictures=4,
        report=lines.append,
    )
    assert len(lines) == 1
    assert lines[0].startswith("preparing the tiny pipeline: transformer, step 100 of 100, loss ")
