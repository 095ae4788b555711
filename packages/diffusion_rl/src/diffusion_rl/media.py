"""Pictures of a run: samples of rollouts, and the same prompts and seeds before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_rl.sample import Sample
from shared_runtime.tracking.sink import LoggedImage

MAX_IMAGES = 8
BEFORE, AFTER, GRID = "before", "after", "samples_before_after.png"


def save_images(directory: Path, name: str, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
    """Keep an image of each of an evaluation's first prompts: `<name>.npy`, uint8 (N, H, W, 3), and `<name>.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[int, dict[str, Any]] = {}
    pixels = []
    for sample, reward in zip(samples, rewards, strict=True):
        image = sample.generated_output
        if image is None or sample.group_index in rows or len(rows) == MAX_IMAGES:
            continue
        rows[sample.group_index] = {"index": sample.index, "prompt": sample.prompt, "reward": reward}
        pixels.append(to_uint8(image))
    if not rows:
        return
    np.save(directory / f"{name}.npy", np.stack(pixels))
    (directory / f"{name}.json").write_text(json.dumps(list(rows.values())), encoding="utf-8")


def logged_images(samples: Sequence[Sample], reward_key: str | None = None) -> list[LoggedImage]:
    """Pictures for the run's log, each with its reward and prompt; samples without an image have none."""
    return [
        LoggedImage(to_uint8(s.generated_output), f"{s.scalar_reward(reward_key):.3f} {s.prompt}")
        for s in samples
        if s.generated_output is not None
    ]


def to_uint8(image: np.ndarray) -> np.ndarray:
    """(3, H, W) float in [0, 1] to (H, W, 3) uint8, rounded."""
    return np.floor(image.transpose(1, 2, 0).clip(0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


def draw_before_after(directory: Path, target: Path) -> Path | None:
    """One column a prompt, above before and below after; `None` where an evaluation is missing."""
    if not all((directory / f"{name}.npy").is_file() for name in (BEFORE, AFTER)):
        return None
    from matplotlib.figure import Figure

    images = {name: np.load(directory / f"{name}.npy") for name in (BEFORE, AFTER)}
    rows = {name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8")) for name in (BEFORE, AFTER)}
    columns = min(len(rows[BEFORE]), len(rows[AFTER]))
    figure = Figure(figsize=(1.7 * columns, 4.2), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    for line, name in enumerate((BEFORE, AFTER)):
        for column in range(columns):
            axis, row = axes[line][column], rows[name][column]
            axis.imshow(images[name][column])
            axis.set_xticks([])
            axis.set_yticks([])
            title = f"{row['reward']:.2f}"
            axis.set_title(title if line else f"{_wrapped(row['prompt'])}\n{title}", fontsize=7)
        axes[line][0].set_ylabel(name)
    figure.savefig(target, dpi=130)
    return target


def _wrapped(prompt: str) -> str:
    import textwrap

    return textwrap.fill(prompt, 22, max_lines=3)
