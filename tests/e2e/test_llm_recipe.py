"""The language-model recipe as its user starts it: command line, Ray, checkpoints, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def recipe(*flags: str, runs: Path, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the recipe; its preset comes from the user's cache, as for a user who has run it before."""
    return subprocess.run(
        [sys.executable, "scripts/run_llm_grpo.py", "--runs-dir", str(runs), *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The default command, whole."""
    runs = tmp_path_factory.mktemp("runs")
    result = recipe(runs=runs)
    assert result.returncode == 0, result.stdout + result.stderr
    return runs / "llm-grpo-tiny", result.stdout


@pytest.mark.slow
@pytest.mark.ray
def test_the_default_run_learns(default_run: tuple[Path, str]) -> None:
    directory, output = default_run
    scores = [row["eval/sums"] for row in rows(directory / "metrics.jsonl") if "eval/sums" in row]
    assert 0.2 <= scores[0] <= 0.6
    assert scores[-1] >= 0.95
    assert f"{scores[0]:.1%} before" in output
    assert f"{scores[-1]:.1%} after" in output


@pytest.mark.slow
@pytest.mark.ray
def test_trainer_and_engine_agree_at_every_step(default_run: tuple[Path, str]) -> None:
    steps = [row for row in rows(default_run[0] / "metrics.jsonl") if "train/loss" in row]
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in steps) < 1e-5
    assert [row["step"] for row in steps] == list(range(len(steps)))


@pytest.mark.slow
@pytest.mark.ray
def test_the_run_directory_is_complete(default_run: tuple[Path, str]) -> None:
    directory, _ = default_run
    keys = {key for row in rows(directory / "metrics.jsonl") for key in row}
    assert keys >= {
        "rollout/raw_reward",
        "rollout/response_len/mean",
        "rollout/truncated_ratio",
        "train/loss",
        "train/pg_loss",
        "train/pg_clipfrac",
        "train/ppo_kl",
        "train/entropy_loss",
        "train/grad_norm",
        "train/lr",
        "train/train_rollout_logprob_abs_diff",
        "perf/rollout_time",
        "perf/reward_time",
        "perf/actor_train_time",
        "perf/update_weights_time",
        "perf/step_time",
        "perf/overhead",
        "perf/tokens_per_s",
        "eval/sums",
    }
    samples = rows(directory / "samples.jsonl")
    assert {"prompt", "response", "label", "reward"} <= samples[0].keys()
    steps = sum("train/loss" in row for row in rows(directory / "metrics.jsonl"))
    assert len(samples) == 512 * steps
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((directory / "config.yaml").read_text())["batch"]["global_batch_size"] == 256
    assert (directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == str(steps)


@pytest.mark.slow
@pytest.mark.ray
def test_the_export_loads_and_scores_the_same(default_run: tuple[Path, str]) -> None:
    from llm_rl.engines.local import LocalEngine
    from llm_rl.presets.recipes import tiny_grpo
    from llm_rl.sample import GenerateRequest, SamplingParams
    from rewards import RewardRequest, score

    directory, _ = default_run
    held_out = rows(Path(tiny_grpo().config.evaluation.sets()["sums"]))
    engine = LocalEngine(directory / "hf")  # loads through AutoModelForCausalLM.from_pretrained
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    prompts = [tuple(engine.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]) for row in held_out]
    outputs = engine.generate([GenerateRequest(str(i), ids, params, seed=i) for i, ids in enumerate(prompts)])
    responses = [engine.tokenizer.decode(list(output.output_ids), skip_special_tokens=True) for output in outputs]
    requests = [RewardRequest(response, row["label"]) for response, row in zip(responses, held_out, strict=True)]
    last = [row["eval/sums"] for row in rows(directory / "metrics.jsonl") if "eval/sums" in row][-1]
    assert sum(score(requests, "math")) / len(requests) == pytest.approx(last, abs=1e-9)


@pytest.mark.slow
@pytest.mark.ray
def test_the_written_config_runs_again(default_run: tuple[Path, str], tmp_path: Path) -> None:
    directory, _ = default_run
    flags = ["--config", str(directory / "config.yaml"), "--num-rollout", "2", "--run-name", "again"]
    result = recipe(*flags, runs=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    again, first = (rows(path / "metrics.jsonl") for path in (tmp_path / "again", directory))
    assert again[1]["rollout/raw_reward"] == first[1]["rollout/raw_reward"]


@pytest.mark.slow
@pytest.mark.ray
def test_two_ranks_and_two_engines_take_the_same_first_step(default_run: tuple[Path, str], tmp_path: Path) -> None:
    flags = ["--actor-num-gpus-per-node", "2", "--num-rollout", "1", "--run-name", "two", "--balance-data"]
    result = recipe(*flags, runs=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    two, one = (rows(path / "metrics.jsonl")[1] for path in (tmp_path / "two", default_run[0]))
    assert two["rollout/raw_reward"] == one["rollout/raw_reward"]
    assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
    assert two["train/train_rollout_logprob_abs_diff"] < 1e-5
