"""Pictures of a run: samples of rollouts, and the same prompts and seeds before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffusion_rl.sample import Sample
from shared_runtime.tracking.sink import LoggedImage

MAX_IMAGES = 8
BEFORE, AFTER, GRID = "before", "after", "samples_before_after.png"


def save_images(directory: Path, name: str, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
    """Keep the first images of an evaluation: `<name>.npy`, uint8 (N, H, W, 3), and `<name>.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = [(s, r) for s, r in zip(samples, rewards, strict=True) if s.generated_output is not None][:MAX_IMAGES]
    if not chosen:
        return
    pixels = np.stack([to_uint8(s.generated_output) for s, _ in chosen if s.generated_output is not None])
    np.save(directory / f"{name}.npy", pixels)
    rows = [{"index": s.index, "prompt": s.prompt, "reward": r} for s, r in chosen]
    (directory / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


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
