"""Seconds of a training update against a bare forward and backward of the same transformer on the same pairs.

    uv run benchmarks/diffusion_train.py [--prompts 6 --images 8 --micro-batch-size 48 --pairs 7]

An update is all that the trainer does with a rollout: collate, forward, loss, backward, clipping, AdamW, metrics. The
bare side takes the mean square of the transformer's output, in the same micro-batches, from tensors that are ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
from _common.diffusion import plan, roll_out, start_trainer, write_model

from diffusion_rl.models.loading import load_component
from diffusion_rl.trainers.fsdp.batch import collate_pairs
from shared_runtime.training.plan import StepPlan

GOAL = 1.15


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--images", type=int, default=8, help="images a prompt")
    parser.add_argument("--micro-batch-size", type=int, default=48, help="pairs a forward pass")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of measurements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(folder)
        samples = roll_out(directory, options.prompts, options.images)
        trainer = start_trainer(directory)
        model = load_component(str(directory), trainer.family, "transformer", dtype=torch.float32).train()
    steps = plan(samples, options.micro_batch_size)
    inputs = [
        collate_pairs([step.rows[i] for i in indices], trainer.family, trainer.context.device)  # type: ignore[misc]
        for step in steps
        for indices in step.micro_batches
    ]

    def update(rollout_id: int, steps: list[StepPlan]) -> float:
        start = time.perf_counter()
        trainer.train(rollout_id, steps)
        return time.perf_counter() - start

    def bare() -> float:
        start = time.perf_counter()
        for batch in inputs:
            output = model(hidden_states=batch.latents, timestep=batch.timesteps, **batch.conditions)[0]
            output.square().mean().backward()
        model.zero_grad()
        return time.perf_counter() - start

    runs = []
    print(f"{sum(len(step.rows) for step in steps)} pairs in {len(inputs)} micro-batches")
    print(f"{'pair':>4} {'update, s':>10} {'forward and backward, s':>24} {'ratio':>7}")
    for pair in range(options.pairs + 1):
        first = bare() if pair % 2 else 0.0
        seconds = update(pair, steps)
        plain = first or bare()
        if pair == 0:
            continue  # warm-up
        run = {"update": round(seconds, 4), "bare": round(plain, 4), "ratio": round(seconds / plain, 4)}
        runs.append(run)
        print(f"{pair:>4} {seconds:>10.3f} {plain:>24.3f} {run['ratio']:>7.3f}", flush=True)
    trainer.shutdown()
    ratio = statistics.median(run["ratio"] for run in runs)
    print(f"median ratio {ratio:.3f}, goal at most {GOAL}")
    print(json.dumps({"benchmark": "diffusion_train", "ratio": ratio, "goal": GOAL, "runs": runs}))


if __name__ == "__main__":
    main()
