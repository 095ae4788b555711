"""A Flow-GRPO update of the trainer against the same one written plainly, one sample and one step at a time.

    uv run benchmarks/diffusion_grpo_reference.py [--prompts 6 --images 8 --micro-batch-size 48 --pairs 5]

The plain side is diffusers and PyTorch as reference scripts have it: for each image and each stochastic step a forward
pass, the log-prob of the stored next latents, the clipped loss, a backward pass; then clipping and AdamW. Both start
from the same weights; the gradient norms of the first update are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time

import torch
from _common.diffusion import PARAMS, plan, roll_out, start_trainer, write_model
from torch import nn

from diffusion_rl.models.loading import load_component
from diffusion_rl.sample import Sample
from diffusion_rl.train_data import rollout_advantages

GOAL = 2.0
CLIP_RANGE = 1e-4


def plain_update(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """One update; returns the gradient norm (Flow-GRPO, arXiv:2505.05470, equations 5 and 9)."""
    advantages = rollout_advantages(samples)
    count = sum(len(sample.trajectory.sde_steps) for sample in samples if sample.trajectory is not None)
    for sample, advantage in zip(samples, advantages, strict=True):
        trajectory, conditions = sample.trajectory, sample.conditions
        assert trajectory is not None
        assert conditions is not None
        text = {name: torch.tensor(value)[None] for name, value in conditions.items()}
        for k, step in enumerate(trajectory.sde_steps):
            x = torch.tensor(trajectory.latent(step))[None]
            following = torch.tensor(trajectory.latent(step + 1))[None]
            sigma, dt = trajectory.sigmas[step], trajectory.sigmas[step + 1] - trajectory.sigmas[step]
            v = model(hidden_states=x, timestep=torch.tensor(trajectory.timesteps[step])[None], **text)[0]
            std = odds_root(float(sigma), float(trajectory.sigmas[1])) * PARAMS.noise_level
            mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
            deviation = std * math.sqrt(-dt)
            log_prob = (
                -((following - mean) ** 2) / (2 * deviation**2) - math.log(deviation) - 0.5 * math.log(2 * math.pi)
            ).mean()
            ratio = torch.exp(log_prob - float(trajectory.log_probs[k]))
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped)
            (loss / count).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def odds_root(sigma: float, sigma_max: float) -> float:
    """√(σ/(1 - σ)), with σ = 1 taken as the grid's second level."""
    return math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--images", type=int, default=8, help="images a prompt")
    parser.add_argument("--micro-batch-size", type=int, default=48, help="pairs a forward pass of the trainer")
    parser.add_argument("--pairs", type=int, default=5, help="alternating pairs of measurements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(folder)
        samples = roll_out(directory, options.prompts, options.images)
        trainer = start_trainer(directory, clip_grad=1.0, diffusion_clip_range=CLIP_RANGE)
        model = load_component(str(directory), trainer.family, "transformer", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps = plan(samples, options.micro_batch_size)
    norms = (plain_update(model, optimizer, samples), trainer.train(0, steps)["train/grad_norm"])
    print(f"gradient norm, plain {norms[0]:.6f}, trainer {norms[1]:.6f}")
    if not math.isclose(*norms, rel_tol=1e-4):
        raise SystemExit("the two updates differ")
    runs = []
    print(f"{len(samples)} images, {sum(len(step.rows) for step in steps)} pairs")
    print(f"{'pair':>4} {'plain, s':>9} {'trainer, s':>11} {'ratio':>7}")
    for pair in range(options.pairs):
        seconds = {}
        for side in ("plain", "trainer") if pair % 2 == 0 else ("trainer", "plain"):
            start = time.perf_counter()
            if side == "plain":
                plain_update(model, optimizer, samples)
            else:
                trainer.train(pair + 1, steps)
            seconds[side] = time.perf_counter() - start
        run = {side: round(seconds[side], 4) for side in ("plain", "trainer")}
        run["ratio"] = round(seconds["plain"] / seconds["trainer"], 4)
        runs.append(run)
        print(f"{pair + 1:>4} {run['plain']:>9.3f} {run['trainer']:>11.3f} {run['ratio']:>7.3f}", flush=True)
    trainer.shutdown()
    ratio = statistics.median(run["ratio"] for run in runs)
    print(f"the trainer is {ratio:.2f} times as fast, goal at least {GOAL}")
    print(json.dumps({"benchmark": "diffusion_grpo_reference", "ratio": ratio, "goal": GOAL, "runs": runs}))


if __name__ == "__main__":
    main()
