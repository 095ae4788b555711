"""The presets that recipes, notebooks and benchmarks start from: settings, and what has to be made first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from llm_rl.config import (
    AlgorithmConfig,
    DistillationConfig,
    EvalConfig,
    HooksConfig,
    ModelConfig,
    PreferenceConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from llm_rl.presets.cache import built_once, cache_root
from shared_runtime import recipe
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    FsdpConfig,
    OptimizerConfig,
)

Preset = recipe.Preset[TrainConfig]


def tiny_grpo(cache: Path | None = None) -> Preset:
    """GRPO on two-digit sums with a 0.8 M parameter model that a short warm-up brought to about a third right."""
    root = (cache or cache_root()) / "tiny"
    model, sums = root / "warm", root / "sums"
    config = TrainConfig(
        cluster=ClusterConfig(colocate=True),
        model=ModelConfig(hf_checkpoint=model),
        data=DataConfig(
            prompt_data=str(sums / "train.jsonl"), input_key="prompt", label_key="label", rollout_shuffle=True
        ),
        batch=BatchConfig(
            num_rollout=200,
            rollout_batch_size=128,
            n_samples_per_prompt=4,
            num_steps_per_rollout=2,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=16384,
        ),
        sampling=SamplingConfig(rollout_max_response_len=4),
        evaluation=EvalConfig(
            eval_prompt_data=("sums", str(sums / "held_out.jsonl")),
            eval_interval=10,
            eval_temperature=0.0,
            eval_target=0.95,
        ),
        reward=RewardConfig(rm_type="math"),
        algorithm=AlgorithmConfig(observe_training_entropy=True),
        optimizer=OptimizerConfig(
            lr=4e-4,
            min_lr=4e-5,
            lr_decay_style="linear",
            lr_warmup_iters=20,
            lr_decay_iters=260,
            weight_decay=0.0,
        ),
        fsdp=FsdpConfig(train_dtype="fp32"),
        checkpoint=CheckpointConfig(save_interval=20),
    )

    def prepare(rebuild: bool) -> None:
        from llm_rl.presets.tiny import write_sums
        from llm_rl.presets.warmup import warm_up

        def write(staging: Path) -> None:
            write_sums(staging)

        built_once(sums, write, rebuild=rebuild)
        built_once(model, lambda staging: warm_up(staging, sums), rebuild=rebuild)

    return Preset("llm-grpo-tiny", config, prepare)


def tiny_opd(cache: Path | None = None) -> Preset:
    """On-policy distillation on two-digit sums: the model of :func:`tiny_grpo` learns from one that knows them.

    Rewards are measured, and 0 in training: all that the student gets is the teacher's log-probs of its own samples.
    """
    base = tiny_grpo(cache)
    root = (cache or cache_root()) / "tiny"
    teacher = root / "teacher"
    config = dataclasses.replace(
        base.config,
        distillation=DistillationConfig(use_opd=True, opd_type="fsdp", opd_teacher_load=teacher),
        hooks=HooksConfig(custom_reward_post_process_path="llm_rl.teachers.post_process_rewards"),
    )

    def prepare(rebuild: bool) -> None:
        from llm_rl.presets.warmup import TEACHER_TARGET, warm_up

        base.prepare(rebuild)
        built_once(teacher, lambda staging: warm_up(staging, root / "sums", target=TEACHER_TARGET), rebuild=rebuild)

    return Preset("llm-opd-tiny", config, prepare)


def smollm2_grpo(cache: Path | None = None) -> Preset:
    """GRPO on one-digit chain sums with SmolLM2-135M-Instruct through its chat template."""
    root = cache or cache_root()
    model, tasks = root / "smollm2-135m", root / "chain-sum"
    config = TrainConfig(
        cluster=ClusterConfig(colocate=True),
        model=ModelConfig(hf_checkpoint=model, rollout_max_batch_size=64),
        data=DataConfig(
            prompt_data=str(tasks / "train.jsonl"), input_key="messages", label_key="label", rollout_shuffle=True
        ),
        batch=BatchConfig(
            num_rollout=20,
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=2048,
        ),
        sampling=SamplingConfig(apply_chat_template=True, rollout_max_response_len=8),
        evaluation=EvalConfig(
            eval_prompt_data=("chain_sum", str(tasks / "held_out.jsonl")), eval_interval=10, n_samples_per_eval_prompt=4
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=5e-6),
        fsdp=FsdpConfig(train_dtype="fp32"),
        hooks=HooksConfig(custom_rm_path="llm_rl.presets.reasoning_tasks.reward"),
    )

    def write_tasks(staging: Path) -> None:
        from llm_rl.presets.reasoning_tasks import write_prompts

        digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        write_prompts(staging / "train.jsonl", "chain_sum", size=1000, seed=1, prefill=True, **digits)
        write_prompts(staging / "held_out.jsonl", "chain_sum", size=64, seed=2, prefill=True, **digits)

    def prepare(rebuild: bool) -> None:
        from llm_rl.presets.smollm2 import build_checkpoint

        built_once(tasks, write_tasks, rebuild=rebuild)
        built_once(model, build_checkpoint, rebuild=rebuild)

    return Preset("llm-grpo-smollm2-135m", config, prepare)


def tiny_sft(cache: Path | None = None) -> Preset:
    """Supervised training on two-digit sums, from drawn weights."""
    root = (cache or cache_root()) / "tiny"
    grpo, model, sums = tiny_grpo(cache).config, root / "untrained", root / "sums"
    config = dataclasses.replace(
        grpo,
        model=ModelConfig(hf_checkpoint=model),
        batch=BatchConfig(
            num_rollout=120,
            rollout_batch_size=640,
            num_steps_per_rollout=5,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=16384,
        ),
        evaluation=dataclasses.replace(grpo.evaluation, eval_target=1 / 3),
        algorithm=AlgorithmConfig(loss_type="sft_loss"),
        optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=5, weight_decay=0.0),
    )

    def prepare(rebuild: bool) -> None:
        from llm_rl.presets.tiny import write_model, write_sums

        def write(staging: Path) -> None:
            write_sums(staging)

        built_once(sums, write, rebuild=rebuild)
        built_once(model, write_model, rebuild=rebuild)

    return Preset("llm-sft-tiny", config, prepare)


def tiny_dpo(cache: Path | None = None) -> Preset:
    """DPO on pairs of a right sum and a wrong one that the warm model drew itself."""
    root = (cache or cache_root()) / "tiny"
    warm, pairs = tiny_grpo(cache), root / "pairs"
    grpo = warm.config
    config = dataclasses.replace(
        grpo,
        data=dataclasses.replace(grpo.data, prompt_data=str(pairs / "pairs.jsonl")),
        batch=BatchConfig(
            num_rollout=12,
            rollout_batch_size=256,
            num_steps_per_rollout=2,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=16384,
        ),
        evaluation=dataclasses.replace(grpo.evaluation, eval_interval=4, eval_target=None),
        algorithm=AlgorithmConfig(loss_type="dpo_loss"),
        preference=PreferenceConfig(dpo_beta=1.0),  # with less, both responses become less likely
        optimizer=OptimizerConfig(lr=5e-5, lr_warmup_iters=5, weight_decay=0.0),
    )

    def prepare(rebuild: bool) -> None:
        from llm_rl.presets.pairs import write_pairs

        warm.prepare(rebuild)
        model, sums = root / "warm", root / "sums" / "train.jsonl"

        def draw(staging: Path) -> None:
            write_pairs(staging / "pairs.jsonl", model, sums)

        built_once(pairs, draw, rebuild=rebuild)

    return Preset("llm-dpo-tiny", config, prepare)


PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_grpo, "smollm2-135m": smollm2_grpo}
SFT_PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_sft}
DPO_PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny_dpo}
