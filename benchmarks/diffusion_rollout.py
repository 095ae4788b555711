"""Images a second of the local engine, with trajectories and log-probs, against the bare diffusers pipeline.

    uv run benchmarks/diffusion_rollout.py [--prompts 6 --images 8 --pairs 7]

Both draw and decode the same number of images of the same prompts with the same model, steps, text length and batch,
in alternating turns. The engine takes every step by the SDE and returns all latents; the pipeline takes the ODE and
keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

from _common.diffusion import NUM_STEPS, PARAMS, PROMPTS, write_model

from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.models.registry import get_family
from diffusion_rl.presets.tiny import TEXT_LENGTH
from diffusion_rl.sample import GenerateRequest

GOAL = 0.9


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6, help="requests a turn")
    parser.add_argument("--images", type=int, default=8, help="images a request: the batch of both sides")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(folder)
        engine, pipeline = LocalEngine(directory), load_pipeline(str(directory), get_family("sd3"))
    pipeline.set_progress_bar_config(disable=True)

    def ours(prompts: list[str]) -> None:
        engine.generate(
            [GenerateRequest(str(i), prompt, options.images, 42 + i, PARAMS) for i, prompt in enumerate(prompts)]
        )

    def bare(prompts: list[str]) -> None:
        for prompt in prompts:
            pipeline(
                prompt,
                num_images_per_prompt=options.images,
                num_inference_steps=NUM_STEPS,
                guidance_scale=PARAMS.guidance_scale,
                height=PARAMS.height,
                width=PARAMS.width,
                max_sequence_length=TEXT_LENGTH,
                output_type="np",
            )

    def images_per_second(side: Callable[[list[str]], None], prompts: list[str]) -> float:
        start = time.perf_counter()
        side(prompts)
        return len(prompts) * options.images / (time.perf_counter() - start)

    sides = {"engine": ours, "pipeline": bare}
    runs = []
    print(f"{options.prompts} prompts x {options.images} images, {NUM_STEPS} steps, {PARAMS.height}x{PARAMS.width}")
    print(f"{'pair':>4} {'engine, images/s':>17} {'diffusers, images/s':>20} {'ratio':>7}")
    for pair in range(options.pairs + 1):
        prompts = [next(PROMPTS) for _ in range(options.prompts)]  # the engine has encoded none of them before
        order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
        rates = {name: images_per_second(sides[name], prompts) for name in order}
        if pair == 0:
            continue  # warm-up
        run = {name: round(rates[name], 2) for name in sides} | {"ratio": round(rates["engine"] / rates["pipeline"], 4)}
        runs.append(run)
        print(f"{pair:>4} {run['engine']:>17.1f} {run['pipeline']:>20.1f} {run['ratio']:>7.3f}", flush=True)
    ratio = statistics.median(run["ratio"] for run in runs)
    print(f"median ratio {ratio:.3f}, goal at least {GOAL}")
    print(json.dumps({"benchmark": "diffusion_rollout", "ratio": ratio, "goal": GOAL, "runs": runs}))


if __name__ == "__main__":
    main()
