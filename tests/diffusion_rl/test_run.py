"""Whole runs of Flow-GRPO on the untrained tiny pipeline: in this process, resumed, through Ray, and refused."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from diffusion_rl.cli import main
from diffusion_rl.config import (
    DiffusionBatchConfig,
    DiffusionFsdpConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
    resolve,
)
from diffusion_rl.models.loading import load_component
from diffusion_rl.models.registry import get_family
from diffusion_rl.preflight import preflight
from diffusion_rl.train import train
from shared_runtime.config import (
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    DataConfig,
    OptimizerConfig,
    RewardPoolConfig,
    RunConfig,
    TrackingConfig,
    from_dict,
)

PROMPTS = ["a small red circle at the top left", "a large blue square at the bottom right"]


@pytest.fixture
def config(tiny_sd3_dir: Path, tmp_path: Path) -> TrainConfig:
    """Two rollouts of two groups of three; every image is worth how well JPEG compresses it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in PROMPTS))
    return TrainConfig(
        run=RunConfig(runs_dir=tmp_path / "runs", in_process=True),
        model=ModelConfig(hf_checkpoint=tiny_sd3_dir),
        data=DataConfig(prompt_data=str(path)),
        batch=DiffusionBatchConfig(
            num_rollout=2,
            rollout_batch_size=2,
            n_samples_per_prompt=4,
            micro_batch_size_sample=2,
            micro_batch_size_tstep=2,
            rollout_microgroup_size=3,
        ),
        sampling=SamplingConfig(
            diffusion_num_steps=4,
            diffusion_num_sde_steps=2,
            diffusion_step_strategy_path="sde_window",
            diffusion_sde_window_range="0,3",
            diffusion_guidance_scale=2.0,
            diffusion_height=64,
            diffusion_width=64,
            diffusion_debug_mode=True,
        ),
        evaluation=EvalConfig(eval_prompt_data=("held_out", str(path))),
        reward=RewardConfig(rm_type="jpeg_compressibility"),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, adam_beta2=0.999),
        fsdp=DiffusionFsdpConfig(diffusion_forward_dtype="fp32"),
        checkpoint=CheckpointConfig(save_interval=1),
        tracking=TrackingConfig(progress="none"),
    )


def changed(config: TrainConfig, **groups: dict[str, Any]) -> TrainConfig:
    return from_dict(config, groups)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model = load_component(str(directory), get_family("sd3"), "transformer", dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_run_and_the_same_run_resumed(config: TrainConfig, tiny_sd3_dir: Path, tmp_path: Path) -> None:
    whole = train(changed(config, run={"run_name": "whole"}))
    metrics = {row["step"]: row for row in rows(whole.metrics_path)}
    assert sorted(metrics) == [-1, 0, 1]
    for step in (0, 1):
        row = metrics[step]
        assert row["train/ratio_abs_minus_1"] < 1e-6
        assert row["train/log_prob_mean_abs_diff"] < 1e-6
        assert row["train/model_output_max_abs_diff"] < 1e-4
        assert row["train/grad_norm"] > 0
        assert row["perf/images_per_s"] > 0
    assert "eval/held_out" in metrics[-1]
    assert "eval/held_out" in metrics[1]
    assert (whole.directory / "samples_before_after.png").is_file()
    assert (whole.directory / "reward.png").is_file()
    samples = rows(whole.directory / "samples.jsonl")
    # Group g of n = 4 has seeds 42 + 4g .. 42 + 4g + 3, however requests are cut.
    assert [row["seed"] for row in samples] == [42 + i for i in range(16)]
    assert whole.hf is not None
    trained, before = weights(whole.hf), weights(tiny_sd3_dir)
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    assert (whole.hf / "model_index.json").is_file()

    first = changed(config, run={"run_name": "resumed"}, batch={"num_rollout": 1})
    train(first)
    resumed = train(changed(first, batch={"num_rollout": 2}))
    again = {row["step"]: row for row in rows(resumed.metrics_path)}[1]
    for key, value in metrics[1].items():
        if not key.startswith(("perf/", "tracking/")):
            assert again[key] == value, key
    assert resumed.hf is not None
    for name, weight in weights(resumed.hf).items():
        torch.testing.assert_close(weight, trained[name], rtol=0, atol=0)


def test_a_run_of_nft_with_lora(config: TrainConfig) -> None:
    """Images come along the ODE; the engines get the average, and that is what the trainer compares with."""
    sampling: dict[str, Any] = {"diffusion_sde_type": "ode", "diffusion_step_strategy_path": None}
    algorithm = {
        "loss_type": "nft",
        "use_ema": True,
        "rollout_weights": "ema",
        "diffusion_nft_num_dropped_timesteps": 2,
    }
    tracking = {"use_wandb": True, "wandb_mode": "offline", "use_tensorboard": True}
    media = {"wandb_log_num_images": 5, "wandb_log_image_interval": 2}
    lora = {"use_lora": True, "lora_rank": 4}
    groups: dict[str, Any] = {"sampling": sampling, "algorithm": algorithm, "lora": lora}
    result = train(changed(config, run={"run_name": "nft"}, tracking=tracking, media=media, **groups))
    metrics = {row["step"]: row for row in rows(result.metrics_path)}
    assert metrics[0]["train/old_velocity_distance"] == 0.0
    assert metrics[0]["train/nft_loss"] > 0
    assert metrics[1]["train/grad_norm"] > 0
    assert metrics[1]["train/ema_decay"] == pytest.approx(0.002)
    check_pictures(result.directory)
    assert result.hf is not None
    assert (result.hf / "lora" / "pytorch_lora_weights.safetensors").is_file()


def check_pictures(directory: Path) -> None:
    """The first five images of rollout 0, and none of rollout 1, in the directory, W&B and TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [path.name for path in directory.glob("media/sample_images_*")] == ["sample_images_000000.png"]
    uploads = sorted(directory.glob("wandb/offline-run-*/files/media/images/rollout_media/*.png"))
    assert len(uploads) == 5
    pixels = np.stack([np.asarray(Image.open(path)) for path in uploads])
    assert pixels.shape == (5, 64, 64, 3)
    assert len({image.tobytes() for image in pixels}) == 5
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    tags = [f"rollout_media/sample_images/{number}" for number in range(5)]
    assert sorted(events.Tags()["images"]) == tags
    in_tensorboard = [np.asarray(Image.open(io.BytesIO(events.Images(tag)[0].encoded_image_string))) for tag in tags]
    assert {image.tobytes() for image in in_tensorboard} == {image.tobytes() for image in pixels}


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_through_ray(config: TrainConfig) -> None:
    """Two trainer ranks, two engines and two workers that score, all on the same two bundles."""
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, in_process=False),
        cluster=ClusterConfig(colocate=True, actor_num_gpus_per_node=2),
        batch=dataclasses.replace(config.batch, num_rollout=1),
        reward_pool=RewardPoolConfig(reward_num_workers=2, reward_colocate=True),
    )
    result = train(config)
    row = {row["step"]: row for row in rows(result.metrics_path)}[0]
    assert row["perf/reward_max_queue_depth_jpeg_compressibility"] >= 0
    assert row["perf/reward_worker_restarts_jpeg_compressibility"] == 0
    assert row["train/ratio_abs_minus_1"] < 1e-6
    assert row["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"sampling": {"diffusion_sde_type": "ode"}}, "ode has no log-probs"),
        ({"sampling": {"diffusion_sde_window_range": "0,9"}}, "--diffusion-num-steps 4"),
        ({"sampling": {"diffusion_sde_window_range": "0-3"}}, "whole numbers with commas"),
        ({"sampling": {"diffusion_height": 60}}, "--diffusion-height 60 must be a multiple of 16"),
        ({"sampling": {"diffusion_noise_level": 0.0}}, "--diffusion-noise-level"),
        ({"model": {"diffusion_task": "t2v"}}, "--diffusion-task 't2v'"),
        ({"model": {"diffusion_model_family": "flux"}}, "Known families"),
        ({"model": {"hf_checkpoint": "/nowhere"}}, "/nowhere is no directory"),
        ({"model": {"update_weight_target_module": "vae"}}, "trains transformer"),
        ({"reward": {"rm_type": "math"}}, "scores texts, not images"),
        ({"reward": {"rm_type": "ocr"}}, "prompts.jsonl:1"),
        ({"reward": {"rm_type": "shape"}}, "shapes"),
        ({"reward": {"group_rm": True}}, "--group-rm needs --custom-rm-path"),
        ({"reward_pool": {"reward_num_workers": 1}}, "--in-process has none"),
        ({"reward_pool": {"reward_colocate": True}}, "--reward-colocate needs --reward-num-workers"),
        ({"batch": {"n_samples_per_prompt": 1}}, "every advantage would be 0"),
        ({"batch": {"micro_batch_size_sample": 3}}, "--micro-batch-size-sample 3 does not divide the 8 samples"),
        ({"batch": {"micro_batch_size_tstep": None}}, "go together"),
        ({"batch": {"global_batch_size": 6}}, "no multiple of --global-batch-size 6"),
        ({"algorithm": {"diffusion_kl_beta": 0.1, "ref_mode": "none"}}, "--ref-mode none"),
        ({"algorithm": {"ref_mode": "lora_base"}}, "needs --use-lora"),
        ({"lora": {"use_lora": True, "lora_target_modules": ["attn.q"]}}, "--lora-target-modules attn.q: no linear"),
        (
            {"lora": {"use_lora": True, "lora_adapter_path": "/nowhere"}},
            "--lora-adapter-path /nowhere holds no adapters",
        ),
        ({"lora": {"lora_adapter_path": "/nowhere"}}, "needs --use-lora"),
        ({"model": {"ref_lora_adapter_path": "/nowhere"}}, "only with --ref-mode ref"),
        ({"fsdp": {"param_dtype_patterns": ["*.nothing=bf16"]}}, "*.nothing: no parameter has a name like that"),
        ({"algorithm": {"loss_type": "nft"}}, "needs --use-ema --rollout-weights ema"),
        ({"debug": {"save_debug_rollout_data": "x{rollout_id}"}}, "can't hold images"),
    ],
)
def test_what_cannot_work_is_refused(config: TrainConfig, groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight(resolve(changed(config, **groups)))
    assert message in str(refused.value)
    of_rows = [problem for problem in refused.value.problems if "prompts.jsonl:" in problem]
    assert len(refused.value.problems) - len(of_rows) <= 1


def test_too_little_memory(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * 2**20))
    with pytest.raises(ConfigError, match=r"needs at least 1\.2 GiB, and 0\.5 GiB are free"):
        preflight(resolve(config))


def test_command_line(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--hf-checkpoint", str(config.model.hf_checkpoint),
        "--prompt-data", str(config.data.prompt_data),
        "--rm-type", "jpeg_compressibility",
        "--rollout-batch-size", "2",
        "--n-samples-per-prompt", "4",
        "--diffusion-height", "64",
        "--diffusion-width", "64",
    ]  # fmt: skip
    main(["train", *flags, "--dry-run"])
    assert "everything checked" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", *flags, "--print-config"])
    assert "adam_beta2: 0.999" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        main(["train", *flags, "--rm-type", "math"])
    assert wrong.value.code == 2
    assert "scores texts" in capsys.readouterr().err
