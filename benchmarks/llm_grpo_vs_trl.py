"""Seconds per GRPO step: this project's in-process loop against TRL's `GRPOTrainer`, on the CPU, pair by pair in turn.

    uv run benchmarks/llm_grpo_vs_trl.py [--pairs 5 --steps 10 --prompts 128 --group-size 4 --max-new-tokens 4]

Both train the tiny preset's warmed-up model in fp32 on the same sums with the same reward function, number of prompts,
group size, response limit, learning rate and number of updates: one optimizer step a rollout, no reference model. TRL
runs without its default gradient checkpointing and bf16, which only cost time at this size. Every run is a process of
its own with `--threads` threads. A step is timed from one scored rollout to the next, so it holds everything that a
step consists of: generating, scoring, training, publishing weights (TRL trains the model that it samples from) and
logging. Start-up and the first two steps of every run are left out, and a run's result is the median of its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL = 0.6
WARM_STEPS = 2
SIDES = ("tandem", "trl")

STAMPS: list[float] = []
RESPONSE_TOKENS: list[float] = []


def stamp(args: Any, all_samples: list[list[Any]], data_source: Any) -> None:
    """A hook that sees each scored rollout: notes when, and how long its responses are."""
    STAMPS.append(time.perf_counter())
    RESPONSE_TOKENS.append(statistics.fmean(sample.response_length for group in all_samples for sample in group))


def run_tandem(settings: argparse.Namespace, directory: Path) -> None:
    """This project's loop, in this process."""
    from llm_rl.config import EvalConfig
    from llm_rl.presets.recipes import tiny_grpo
    from llm_rl.train import train
    from shared_runtime.config import CheckpointConfig, RunConfig, TrackingConfig

    base = tiny_grpo().config
    config = dataclasses.replace(
        base,
        run=RunConfig(in_process=True, runs_dir=directory, run_name="tandem"),
        batch=dataclasses.replace(
            base.batch,
            num_rollout=settings.steps + WARM_STEPS + 1,
            rollout_batch_size=settings.prompts,
            n_samples_per_prompt=settings.group_size,
            num_steps_per_rollout=1,
        ),
        sampling=dataclasses.replace(base.sampling, rollout_max_response_len=settings.max_new_tokens),
        evaluation=EvalConfig(),
        checkpoint=CheckpointConfig(save_hf=None),
        tracking=TrackingConfig(progress="none"),
        hooks=dataclasses.replace(base.hooks, rollout_all_samples_process_path="llm_grpo_vs_trl.stamp"),
    )
    train(config)


def run_trl(settings: argparse.Namespace, directory: Path) -> None:
    """TRL's trainer on the same model, sums and reward."""
    import llm_grpo_vs_trl as stamps
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from llm_rl.presets.recipes import tiny_grpo
    from rewards import RewardRequest, score

    base = tiny_grpo().config
    rows = [json.loads(line) for line in Path(str(base.data.prompt_data)).read_text().splitlines()]

    def reward(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        requests = [RewardRequest(response=text, label=answer) for text, answer in zip(completions, label, strict=True)]
        scores = [float(value) for value in score(requests, rm_type="math")]
        stamps.STAMPS.append(time.perf_counter())
        stamps.RESPONSE_TOKENS.append(statistics.fmean(map(len, completion_ids)))
        return scores

    optimizer = base.optimizer
    arguments = GRPOConfig(
        output_dir=str(directory),
        max_steps=settings.steps + WARM_STEPS + 1,
        per_device_train_batch_size=settings.prompts * settings.group_size,
        num_generations=settings.group_size,
        max_completion_length=settings.max_new_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base.model.hf_checkpoint),
        processing_class=AutoTokenizer.from_pretrained(base.model.hf_checkpoint),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()


def run_side(settings: argparse.Namespace) -> None:
    """The child process: one run; its result is the last line of its output."""
    import llm_grpo_vs_trl as stamps

    with tempfile.TemporaryDirectory() as directory:
        {"tandem": run_tandem, "trl": run_trl}[settings.side](settings, Path(directory))
    times = stamps.STAMPS
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)][WARM_STEPS:]
    print(json.dumps({"seconds": seconds, "tokens": statistics.fmean(stamps.RESPONSE_TOKENS[WARM_STEPS:])}))


def measure(side: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a fresh process; returns its steps' seconds and its mean response length."""
    command = [sys.executable, __file__, "--side", side]
    for name in ("steps", "prompts", "group_size", "max_new_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = os.environ | offline | {"OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {side} run failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if len(result["seconds"]) != settings.steps:
        raise SystemExit(f"the {side} run has {len(result['seconds'])} steps to time, expected {settings.steps}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each run")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.side:
        run_side(settings)
        return

    from llm_rl.presets.recipes import tiny_grpo

    tiny_grpo().prepare(False)
    print(
        f"{settings.prompts} prompts x {settings.group_size} samples, up to {settings.max_new_tokens} new tokens, "
        f"{settings.steps} timed steps a run, {settings.threads} threads"
    )
    print(f"{'pair':>4} {'tandem s/step':>14} {'TRL s/step':>12} {'ratio':>7}   mean response tokens")
    runs = []
    for pair in range(settings.pairs):
        order = SIDES if pair % 2 == 0 else SIDES[::-1]
        results = {side: measure(side, settings) for side in order}
        seconds = {side: statistics.median(results[side]["seconds"]) for side in SIDES}
        ratio = seconds["tandem"] / seconds["trl"]
        tokens = {side: results[side]["tokens"] for side in SIDES}
        print(
            f"{pair + 1:4} {seconds['tandem']:14.3f} {seconds['trl']:12.3f} {ratio:7.3f}   "
            f"{tokens['tandem']:.2f} / {tokens['trl']:.2f}",
            flush=True,
        )
        runs.append({**{side: round(value, 4) for side, value in seconds.items()}, "ratio": round(ratio, 4)})
    ratio = statistics.median(run["ratio"] for run in runs)
    print(f"median ratio {ratio:.3f}, goal at most {GOAL}")
    print(json.dumps({"benchmark": "llm_grpo_vs_trl", "ratio": round(ratio, 4), "goal": GOAL, "runs": runs}))


if __name__ == "__main__":
    # Last, not first: a benchmark beside this one may have the name of a package.
    sys.path.append(sys.path.pop(0))
    main()
