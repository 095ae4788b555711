"""The presets that recipes, notebooks and benchmarks start from: settings, and what has to be made first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from diffusion_rl.config import (
    AlgorithmConfig,
    DiffusionBatchConfig,
    DiffusionFsdpConfig,
    EvalConfig,
    MediaConfig,
    ModelConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from shared_runtime import recipe
from shared_runtime.cache import built_once, cache_root
from shared_runtime.config import CheckpointConfig, ClusterConfig, DataConfig, OptimizerConfig

Preset = recipe.Preset[TrainConfig]


def tiny_grpo(cache: Path | None = None) -> Preset:
    """Flow-GRPO on coloured shapes with a 1.7 M parameter SD3 that a short warm-up taught to follow prompts in part."""
    root = (cache or cache_root()) / "tiny-diffusion"
    model, shapes = root / "tiny-sd3.5-medium", root / "shapes"
    config = TrainConfig(
        cluster=ClusterConfig(colocate=True),
        model=ModelConfig(hf_checkpoint=model),
        data=DataConfig(prompt_data=str(shapes / "train.jsonl"), rollout_shuffle=True),
        batch=DiffusionBatchConfig(
            num_rollout=70,
            rollout_batch_size=12,
            n_samples_per_prompt=8,
            num_steps_per_rollout=2,
            micro_batch_size_sample=24,
            micro_batch_size_tstep=4,
            rollout_microgroup_size=8,
        ),
        sampling=SamplingConfig(
            diffusion_num_steps=8,
            diffusion_num_sde_steps=4,
            diffusion_step_strategy_path="sde_window",
            diffusion_sde_window_range="0,4",
            diffusion_guidance_scale=1.0,
            diffusion_height=64,
            diffusion_width=64,
        ),
        evaluation=EvalConfig(
            eval_prompt_data=("shapes", str(shapes / "held_out.jsonl")),
            eval_interval=10,
            n_samples_per_eval_prompt=4,
        ),
        reward=RewardConfig(rm_type="shapes"),
        optimizer=OptimizerConfig(lr=3e-4, lr_decay_style="linear", weight_decay=0.0, adam_beta2=0.99),
        fsdp=DiffusionFsdpConfig(diffusion_forward_dtype="fp32"),
        checkpoint=CheckpointConfig(save_interval=20),
        media=MediaConfig(wandb_log_num_images=16, wandb_log_image_interval=20),
    )

    def prepare(rebuild: bool) -> None:
        from diffusion_rl.presets.shapes import write_prompts
        from diffusion_rl.presets.warmup import warm_up

        def train(staging: Path) -> None:
            warm_up(staging)

        built_once(shapes, write_prompts, rebuild=rebuild)
        built_once(model, train, rebuild=rebuild)

    return Preset("diffusion-grpo-tiny", config, prepare)


def tiny_nft(cache: Path | None = None) -> Preset:
    """DiffusionNFT on the same model, prompts and reward: images come along the ODE, from the moving average."""
    grpo = tiny_grpo(cache)
    config = dataclasses.replace(
        grpo.config,
        batch=dataclasses.replace(grpo.config.batch, num_rollout=30),
        sampling=dataclasses.replace(
            grpo.config.sampling,
            diffusion_sde_type="ode",
            diffusion_num_sde_steps=0,
            diffusion_step_strategy_path="ode_and_return_last",
            diffusion_sde_window_range=None,
        ),
        algorithm=AlgorithmConfig(
            loss_type="nft", use_ema=True, rollout_weights="ema", diffusion_nft_num_dropped_timesteps=4
        ),
    )
    return Preset("diffusion-nft-tiny", config, grpo.prepare)


def tiny_sft(cache: Path | None = None) -> Preset:
    """Flow matching on captioned pictures of coloured shapes: the same model, from a transformer with drawn weights."""
    root = (cache or cache_root()) / "tiny-diffusion"
    grpo = tiny_grpo(cache).config
    model, shapes = root / "untrained" / "tiny-sd3.5-medium", root / "captioned"
    config = dataclasses.replace(
        grpo,
        model=ModelConfig(hf_checkpoint=model),
        data=DataConfig(prompt_data=str(shapes / "captioned.jsonl"), label_key="image", rollout_shuffle=True),
        batch=DiffusionBatchConfig(
            num_rollout=80,
            rollout_batch_size=640,
            n_samples_per_prompt=1,
            num_steps_per_rollout=10,
            micro_batch_size=64,
            rollout_microgroup_size=4,
        ),
        evaluation=dataclasses.replace(
            grpo.evaluation, eval_prompt_data=("shapes", str(shapes / "held_out.jsonl")), eval_target=None
        ),
        algorithm=AlgorithmConfig(loss_type="sft_loss"),
        optimizer=OptimizerConfig(
            lr=1e-3, lr_decay_style="cosine", lr_warmup_iters=20, weight_decay=0.0, adam_beta2=0.999
        ),
    )

    def prepare(rebuild: bool) -> None:
        from diffusion_rl.presets.shapes import write_shapes
        from diffusion_rl.presets.tiny import write_pipeline

        def draw(staging: Path) -> None:
            write_shapes(staging)

        def build(staging: Path) -> None:
            write_pipeline(staging / model.name)

        built_once(shapes, draw, rebuild=rebuild)
        built_once(model.parent, build, rebuild=rebuild)

    return Preset("diffusion-sft-tiny", config, prepare)


GRPO_PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_grpo}
NFT_PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_nft}
SFT_PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_sft}
