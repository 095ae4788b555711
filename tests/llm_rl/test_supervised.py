"""Supervised and preference runs: whole runs and resumed ones, DPO against its formula, bad rows by line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, make_rows, make_trainer, row_log_probs
from fsdp_reference import assert_same_gradients, gradients, plain_model

from llm_rl.config import AlgorithmConfig, ModelConfig, PreferenceConfig, TrainConfig, resolve
from llm_rl.preflight import preflight
from llm_rl.presets.tiny import sum_rows
from llm_rl.supervised import plan_pairs
from llm_rl.train import train
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    FsdpConfig,
    OptimizerConfig,
    RunConfig,
    TrackingConfig,
)

SUMS = sum_rows()[0][:12]
PAIRS = [{"prompt": row["prompt"], "chosen": row["label"], "rejected": "7" + row["label"][1:] + "1"} for row in SUMS]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(loss_type: Any, model: Path, folder: Path, rows: list[dict[str, Any]]) -> TrainConfig:
    data = DataConfig(
        prompt_data=write(folder / "rows.jsonl", rows),
        input_key="prompt",
        label_key="label" if loss_type == "sft_loss" else None,
        rollout_shuffle=True,
    )
    return TrainConfig(
        run=RunConfig(runs_dir=folder / "runs", in_process=True),
        model=ModelConfig(hf_checkpoint=model),
        data=data,
        batch=BatchConfig(
            num_rollout=4,
            rollout_batch_size=8,
            num_steps_per_rollout=2,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=64,
        ),
        algorithm=AlgorithmConfig(loss_type=loss_type),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0),
        fsdp=FsdpConfig(train_dtype="fp32"),
        checkpoint=CheckpointConfig(save_interval=2),
        tracking=TrackingConfig(progress="none"),
    )


def metrics_of(path: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("loss_type", ["sft_loss", "dpo_loss"])
def test_a_run_and_the_same_run_resumed(loss_type: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of(loss_type, tiny_model_dir, tmp_path, SUMS if loss_type == "sft_loss" else PAIRS)
    whole = train(dataclasses.replace(config, run=dataclasses.replace(config.run, run_name="whole")))
    metrics = metrics_of(whole.metrics_path)
    assert metrics[3]["train/loss"] < metrics[0]["train/loss"]
    if loss_type == "dpo_loss":
        assert metrics[3]["train/rewards/margins"] > metrics[0]["train/rewards/margins"]
        assert metrics[3]["train/rewards/accuracies"] > 0.9
    short = dataclasses.replace(config.batch, num_rollout=2)
    first = dataclasses.replace(config, run=dataclasses.replace(config.run, run_name="resumed"), batch=short)
    train(first)
    again = metrics_of(train(dataclasses.replace(first, batch=config.batch)).metrics_path)[3]
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert again[key] == metrics[3][key], key


def preference_loss(
    model: torch.nn.Module, reference: torch.nn.Module, rows: list[dict], beta: float, smooth: float
) -> tuple[torch.Tensor, np.ndarray]:
    """TRL's sigmoid loss, one sequence at a time, in the dtype of the models."""

    def summed(subject: torch.nn.Module, row: dict) -> torch.Tensor:
        return (row_log_probs(subject, row) * torch.as_tensor(row["loss_mask"])).sum()

    losses, rewards = [], []
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        ratios = [summed(model, row) - summed(reference, row).detach() for row in (chosen, rejected)]
        logits = beta * (ratios[0] - ratios[1])
        log_sigmoid = torch.nn.functional.logsigmoid
        losses.append(-log_sigmoid(logits) * (1 - smooth) - log_sigmoid(-logits) * smooth)
        rewards.append([beta * ratio.item() for ratio in ratios])
    return torch.stack(losses).mean(), np.array(rewards)


def test_a_dpo_step_is_the_formula(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Packed in several micro-batches, from a reference with other weights, in float64."""
    from llm_rl.presets.tiny import write_model

    write_model(tmp_path / "reference", seed=1)
    rows = make_rows(3, groups=3, group_size=2)
    trainer = make_trainer(
        tiny_model_dir,
        loss_type="dpo_loss",
        ref_load=tmp_path / "reference",
        dpo_beta=0.3,
        dpo_label_smoothing=0.1,
        train_dtype="fp64",
        rollout_temperature=0.5,  # plays no part
        clip_grad=0.0,
    )
    try:
        seen = capture_gradients(trainer)
        steps = plan_pairs(rows, dp_size=1, num_steps=1, max_tokens_per_gpu=50)[0]
        assert len(steps[0].micro_batches) > 1
        metrics = trainer.train(0, steps)
    finally:
        trainer.shutdown()
    model, reference = plain_model(tiny_model_dir).double(), plain_model(tmp_path / "reference").double()
    loss, rewards = preference_loss(model, reference, rows, 0.3, 0.1)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    margins = rewards[:, 0] - rewards[:, 1]
    expected = {"chosen": rewards[:, 0], "rejected": rewards[:, 1], "margins": margins, "accuracies": margins > 0}
    for name, values in expected.items():
        assert metrics[f"train/rewards/{name}"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-7), name
    assert_same_gradients(dict(seen), gradients(model, loss), rtol=0, atol=3e-6)


@pytest.mark.parametrize("layout", [{"micro_batch_size": 2}, {"max_tokens_per_gpu": 50}, {"balance_data": True}])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_pairs_stay_together(layout: dict[str, Any], dp_size: int) -> None:
    rows = make_rows(5, groups=3, group_size=2)
    plans = plan_pairs(rows, dp_size=dp_size, num_steps=1, **layout)
    seen = []
    for rank in plans:
        (step,) = rank
        assert step.global_num_samples == 6
        assert step.global_num_tokens == sum(int(row["loss_mask"].sum()) for row in rows)
        for batch in step.micro_batches:
            indices = [step.rows[i]["sample_index"] for i in batch]
            assert all(a % 2 == 0 and b == a + 1 for a, b in zip(indices[::2], indices[1::2], strict=True))
            seen += indices
    assert sorted(seen) == list(range(6))


TURN = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("loss_type", "row", "message"),
    [
        ("sft_loss", {"prompt": "1+1="}, "the row has no response"),
        ("sft_loss", {"prompt": TURN, "label": None}, "no assistant turn"),
        ("sft_loss", {"prompt": "1+1=", "label": "1" * 600}, "the model's context is 512"),
        ("sft_loss", {"prompt": "1+1=", "label": "1" * 70}, "--max-tokens-per-gpu 64"),
        ("dpo_loss", {"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "the chosen response equals the rejected one"),
        ("dpo_loss", {"prompt": "1+1=", "chosen": "2"}, "the pair has no rejected response"),
        ("dpo_loss", {"prompt": "1+1=", "chosen": "2" * 30, "rejected": "3" * 30}, "both sequences of the pair have"),
    ],
)
def test_a_bad_row_is_named(
    loss_type: str, row: dict[str, Any], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    good = SUMS[0] if loss_type == "sft_loss" else PAIRS[0]
    config = config_of(loss_type, tiny_model_dir, tmp_path, [good, row])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: ") as refused:
        preflight(resolve(config))
    assert message in str(refused.value)


def test_a_missing_column_is_one_message(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of("dpo_loss", tiny_model_dir, tmp_path, SUMS)
    with pytest.raises(ConfigError, match="no row has the key 'chosen'"):
        preflight(resolve(config))


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("batch", BatchConfig(rollout_batch_size=8, n_samples_per_prompt=4), "--n-samples-per-prompt must be 2"),
        ("algorithm", AlgorithmConfig(loss_type="dpo_loss", use_kl_loss=True), "--use-kl-loss has no part in"),
        ("preference", PreferenceConfig(dpo_beta=0.0), "--dpo-beta"),
        ("preference", PreferenceConfig(dpo_label_smoothing=0.5), "--dpo-label-smoothing"),
    ],
)
def test_settings_that_cannot_work(group: str, values: Any, message: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of("dpo_loss", tiny_model_dir, tmp_path, PAIRS)
    with pytest.raises(ConfigError, match=message):
        resolve(dataclasses.replace(config, **{group: values}))
