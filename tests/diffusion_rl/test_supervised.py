"""Supervised runs: captioned pictures are encoded, trained on, resumed exactly; bad rows are refused by line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_rl.config import (
    AlgorithmConfig,
    DiffusionBatchConfig,
    DiffusionFsdpConfig,
    EvalConfig,
    ModelConfig,
    SamplingConfig,
    TrainConfig,
    resolve,
)
from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.preflight import preflight
from diffusion_rl.presets.shapes import write_shapes
from diffusion_rl.sample import Sample
from diffusion_rl.supervised import SupervisedRollout, read_picture
from diffusion_rl.train import train
from shared_runtime.config import CheckpointConfig, ConfigError, DataConfig, OptimizerConfig, RunConfig, TrackingConfig
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.data.source import RolloutDataSource
from shared_runtime.placement.groups import InProcessGroup


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve captioned pictures."""
    return write_shapes(tmp_path_factory.mktemp("captioned"), num_pictures=12).captioned


@pytest.fixture
def config(tiny_sd3_dir: Path, captioned: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        run=RunConfig(runs_dir=tmp_path / "runs", in_process=True),
        model=ModelConfig(hf_checkpoint=tiny_sd3_dir),
        data=DataConfig(prompt_data=str(captioned), label_key="image", rollout_shuffle=True),
        batch=DiffusionBatchConfig(
            num_rollout=4, rollout_batch_size=8, n_samples_per_prompt=1, num_steps_per_rollout=2, micro_batch_size=2
        ),
        sampling=SamplingConfig(diffusion_num_steps=4, diffusion_height=64, diffusion_width=64),
        evaluation=EvalConfig(),
        algorithm=AlgorithmConfig(loss_type="sft_loss"),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0),
        fsdp=DiffusionFsdpConfig(diffusion_forward_dtype="fp32"),
        checkpoint=CheckpointConfig(save_interval=2),
        tracking=TrackingConfig(progress="none"),
    )


def metrics_of(path: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_run_and_the_same_run_resumed(config: TrainConfig) -> None:
    whole = train(dataclasses.replace(config, run=dataclasses.replace(config.run, run_name="whole")))
    metrics = metrics_of(whole.metrics_path)
    assert metrics[3]["train/loss"] < metrics[0]["train/loss"]
    assert [metrics[i]["rollout/newly_encoded"] for i in (0, 3)] == [8.0, 0.0]  # twelve pictures in the first epochs
    assert (whole.directory / "loss.png").is_file()
    assert not (whole.directory / "reward.png").exists()
    first = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, run_name="resumed"),
        batch=dataclasses.replace(config.batch, num_rollout=2),
    )
    train(first)
    resumed = train(dataclasses.replace(first, batch=config.batch))
    again = metrics_of(resumed.metrics_path)[3]
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert again[key] == metrics[3][key], key


def test_what_is_encoded_is_what_diffusers_encodes(tiny_sd3: Any, tiny_sd3_dir: Path, captioned: Path) -> None:
    dataset = PromptDataset.load(captioned, label_key="image")
    source = RolloutDataSource(dataset, Sample)
    rollout = SupervisedRollout(source, InProcessGroup(LocalEngine(tiny_sd3_dir)), captioned.parent, 1)
    for row in list(dataset)[:3]:
        ((sample,),) = asyncio.run(rollout(0)).samples
        # The norms of an untrained encoder blow up the rounding of flat ground, so it gets the very same pixels.
        pixels = torch.from_numpy(read_picture(captioned.parent / row.label))[None] * 2.0 - 1.0
        preprocessed = tiny_sd3.image_processor.preprocess(Image.open(captioned.parent / row.label))
        torch.testing.assert_close(pixels, preprocessed, rtol=0, atol=1e-6)
        with torch.no_grad():
            latents = tiny_sd3.vae.encode(pixels).latent_dist.mode()
            expected = (latents - tiny_sd3.vae.config.shift_factor) * tiny_sd3.vae.config.scaling_factor
            text, _, pooled, _ = tiny_sd3.encode_prompt(
                row.prompt, row.prompt, row.prompt, do_classifier_free_guidance=False, max_sequence_length=12
            )
        assert sample.trajectory is not None
        assert sample.conditions is not None
        np.testing.assert_allclose(sample.trajectory.clean, expected[0].numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(sample.conditions["encoder_hidden_states"], text[0].numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(sample.conditions["pooled_projections"], pooled[0].numpy(), rtol=0, atol=1e-5)


def test_evaluation_prompts_need_no_pictures(config: TrainConfig, captioned: Path) -> None:
    evaluation = EvalConfig(eval_prompt_data=("shapes", str(captioned.with_name("held_out.jsonl"))))
    reward = dataclasses.replace(config.reward, rm_type="shapes")
    prepared = preflight(resolve(dataclasses.replace(config, evaluation=evaluation, reward=reward)))
    assert len(prepared.eval_sets["shapes"]) == 16


def test_pictures_of_any_mode_are_rgb(tmp_path: Path) -> None:
    Image.new("LA", (3, 2), (255, 128)).save(tmp_path / "grey.png")
    picture = read_picture(tmp_path / "grey.png")
    assert picture.shape == (3, 2, 3)
    assert picture.dtype == np.float32
    assert picture.min() == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "a", "image": "absent.png"}, "rows.jsonl:2: there is no picture"),
        ({"input": "a", "image": "small.png"}, "rows.jsonl:2: "),
        ({"input": "a", "image": "rows.jsonl"}, "cannot identify image file"),
        ({"input": "a", "image": 3}, "must be a path or {'visual': path}"),
        ({"input": "a", "image": {"video": "x"}}, "must be a path or {'visual': path}"),
    ],
)
def test_a_bad_row_is_named(config: TrainConfig, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    Image.new("RGB", (32, 64)).save(tmp_path / "small.png")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"input": "a", "image": {"visual": "good.png"}}, row)))
    data = dataclasses.replace(config.data, prompt_data=str(path))
    with pytest.raises(ConfigError, match=r"rows.jsonl:2") as refused:
        preflight(resolve(dataclasses.replace(config, data=data)))
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("group", "changes", "message"),
    [
        ("data", {"label_key": None}, "needs --label-key"),
        ("batch", {"n_samples_per_prompt": 2, "num_steps_per_rollout": 4}, "--n-samples-per-prompt must be 1"),
        ("algorithm", {"diffusion_kl_beta": 0.1}, "do nothing with --loss-type sft_loss"),
        ("algorithm", {"fsdp_flow_shift": 0.0}, "--fsdp-flow-shift"),
    ],
)
def test_settings_that_cannot_work(config: TrainConfig, group: str, changes: dict[str, Any], message: str) -> None:
    changed = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **changes)})
    with pytest.raises(ConfigError, match=message):
        preflight(resolve(changed))
