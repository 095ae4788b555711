"""A run whose rewards come from Ray workers, one of which is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from llm_rl.presets.recipes import tiny_grpo
from llm_rl.presets.tiny import write_sums
from llm_rl.train import train
from shared_runtime.config import RewardPoolConfig, RunConfig, TrackingConfig

KILLED: list[int] = []


def kill_the_scorer(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> bool:
    """Kills the reward worker of this run behind its first rollout (`--custom-rollout-log-function-path`)."""
    if rollout_id == 0:
        scorers = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if any("_RewardWorker" in word for word in child.cmdline())
        ]
        for pid in scorers:
            os.kill(pid, signal.SIGKILL)
        KILLED.extend(scorers)
    return False


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_run_goes_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    sums = write_sums(tmp_path / "sums")
    recipe = tiny_grpo().config
    config = dataclasses.replace(
        recipe,
        run=RunConfig(runs_dir=tmp_path / "runs"),
        model=dataclasses.replace(recipe.model, hf_checkpoint=tiny_model_dir),
        data=dataclasses.replace(recipe.data, prompt_data=str(sums.train)),
        batch=dataclasses.replace(
            recipe.batch, num_rollout=2, rollout_batch_size=4, n_samples_per_prompt=4, num_steps_per_rollout=1
        ),
        evaluation=dataclasses.replace(recipe.evaluation, eval_prompt_data=(), eval_interval=None, eval_target=None),
        reward_pool=RewardPoolConfig(reward_num_workers=1, reward_num_cpus_per_worker=0.5, reward_batch_size=4),
        hooks=dataclasses.replace(recipe.hooks, custom_rollout_log_function_path=f"{__name__}.kill_the_scorer"),
        tracking=TrackingConfig(progress="none"),
    )
    result = train(config)
    metrics = {row["step"]: row for row in map(json.loads, result.metrics_path.read_text().splitlines())}
    samples = [json.loads(line) for line in (result.directory / "samples.jsonl").read_text().splitlines()]
    assert len(KILLED) == 1
    restarts = "perf/reward_worker_restarts_math"
    assert (metrics[0][restarts], metrics[1][restarts]) == (0, 1)
    assert min(metrics[step]["perf/reward_max_queue_depth_math"] for step in (0, 1)) >= 1  # 4 batches, one worker
    assert len(samples) == 32
    assert {row["reward"] for row in samples} <= {0.0, 1.0}
