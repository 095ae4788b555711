"""The diffusion recipe as its user starts it: command line, Ray, pictures, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytestmark = pytest.mark.timeout(1500)  # the first of these tests may have to make the pipeline

ROOT = Path(__file__).parents[2]
ROLLOUTS = 20


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default command with fewer rollouts; its pipeline comes from the user's cache, or is made there."""
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--runs-dir", str(runs), "--num-rollout", str(ROLLOUTS), "--eval-interval", str(ROLLOUTS)]
    result = subprocess.run(
        [sys.executable, "scripts/run_diffusion_grpo.py", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return runs / "diffusion-grpo-tiny"


@pytest.mark.slow
@pytest.mark.ray
def test_the_reward_climbs(short_run: Path) -> None:
    scores = [row["eval/shapes"] for row in rows(short_run / "metrics.jsonl") if "eval/shapes" in row]
    assert 0.4 <= scores[0] <= 0.75  # the warm-up leaves something to learn
    assert scores[-1] >= scores[0] + 0.05


@pytest.mark.slow
@pytest.mark.ray
def test_trainer_and_engine_agree_at_every_step(short_run: Path) -> None:
    steps = [row for row in rows(short_run / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(ROLLOUTS))
    assert max(row["train/log_prob_mean_abs_diff"] for row in steps) < 1e-5


@pytest.mark.slow
@pytest.mark.ray
def test_the_run_directory_is_complete(short_run: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    samples = rows(short_run / "samples.jsonl")
    assert {"prompt", "seed", "reward"} <= samples[0].keys()
    for name in ("reward.png", "samples_before_after.png"):
        with Image.open(short_run / name) as picture:
            assert min(picture.size) > 300
    pipeline = StableDiffusion3Pipeline.from_pretrained(short_run / "hf")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("a small red circle at the top left", num_inference_steps=2, height=64, width=64).images
