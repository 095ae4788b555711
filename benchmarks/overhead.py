"""What a step costs besides its work: the share that is not generating, scoring, training or publishing.

    uv run benchmarks/overhead.py [--steps 20 --pairs 5]

The default recipe runs with Ray and in-process, in alternating pairs; the share is `perf/overhead` of metrics.jsonl,
over all steps but the first (which warms up) and those with an evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _common  # noqa: F401

from llm_rl.config import TrainConfig
from llm_rl.presets.recipes import tiny_grpo

GOALS = {"ray": 0.05, "in_process": 0.01}


def config(side: str, steps: int, runs: Path) -> TrainConfig:
    """The default recipe, without evaluation and checkpoints."""
    base = tiny_grpo().config
    return dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, runs_dir=runs, in_process=side == "in_process"),
        batch=dataclasses.replace(base.batch, num_rollout=steps),
        evaluation=dataclasses.replace(base.evaluation, eval_prompt_data=(), eval_interval=None, eval_target=None),
        checkpoint=dataclasses.replace(base.checkpoint, save_interval=None, save_hf=None),
        tracking=dataclasses.replace(base.tracking, progress="none"),
    )


def measure(side: str, steps: int) -> float:
    """Mean overhead of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, __file__, "--side", side, "--steps", str(steps), "--runs-dir", runs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(runs) / "overhead" / "metrics.jsonl").read_text().splitlines()
    shares = [row["perf/overhead"] for row in map(json.loads, lines) if "train/loss" in row]
    return statistics.fmean(shares[1:])


def main() -> None:
    """Run the pairs, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--side", choices=[*GOALS], help=argparse.SUPPRESS)
    parser.add_argument("--runs-dir", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.side is not None:
        from llm_rl.train import train

        train(config(settings.side, settings.steps, settings.runs_dir), recipe="overhead")
        return
    tiny_grpo().prepare(False)
    runs = []
    print(f"{'pair':>4} {'with Ray':>10} {'in-process':>10}")
    for pair in range(settings.pairs):
        sides = list(GOALS) if pair % 2 == 0 else list(GOALS)[::-1]
        shares = {side: measure(side, settings.steps) for side in sides}
        runs.append({side: round(shares[side], 5) for side in GOALS})
        print(f"{pair:>4} {shares['ray']:>10.2%} {shares['in_process']:>10.2%}", flush=True)
    medians = {side: statistics.median(run[side] for run in runs) for side in GOALS}
    for side, share in medians.items():
        print(f"median {side}: {share:.2%}, goal at most {GOALS[side]:.0%}")
    print(
        json.dumps(
            {
                "benchmark": "overhead",
                "ratio": medians["ray"],
                "goal": GOALS["ray"],
                "in_process_ratio": medians["in_process"],
                "in_process_goal": GOALS["in_process"],
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
