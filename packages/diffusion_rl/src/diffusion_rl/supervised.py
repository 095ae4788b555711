"""Supervised training: a rollout that encodes captioned pictures instead of drawing images.

A row's label is its target picture: a path, relative to the file of rows or absolute, or `{"visual": path}`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_rl.sample import EncodedPicture, Sample, Trajectory
from shared_runtime.data.prompts import PromptRow
from shared_runtime.data.source import DataSource
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.sample import Status

MAX_CACHED_BYTES = 1 << 30


def picture_path(label: Any, folder: Path) -> Path:
    """Where a row's target picture lies.

    Args:
        label: A path, or an object with a path at `visual`.
        folder: Of the file of rows.

    Raises:
        ValueError: If the label is neither.
    """
    path = label.get("visual") if isinstance(label, dict) else label
    if not isinstance(path, str) or not path:
        raise ValueError(f"the target picture must be a path or {{'visual': path}}, got {label!r}")
    return folder / path


def picture_problem(row: PromptRow, folder: Path, height: int, width: int) -> str | None:
    """Why a row can't be trained on: no picture, none that opens, or one of another size. Reads the header only."""
    from PIL import Image, UnidentifiedImageError

    try:
        path = picture_path(row.label, folder)
        with Image.open(path) as picture:
            size = picture.size
    except FileNotFoundError:
        return f"there is no picture {path}"
    except (OSError, ValueError, UnidentifiedImageError) as error:
        return str(error)
    if size != (width, height):
        return (
            f"{path} has {size[0]}x{size[1]} pixels, and the run trains on {width}x{height} "
            "(--diffusion-width, --diffusion-height): resize the pictures beforehand"
        )
    return None


def read_picture(path: Path) -> np.ndarray:
    """A picture as (3, H, W) float32 in [0, 1]."""
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class SupervisedRollout:
    """Brings one training batch after the other: captions and pictures, encoded by the engines.

    What was encoded is remembered, up to a gigabyte, since text encoders and VAE never change.

    Args:
        source: Where rows come from.
        engines: They hold the encoders.
        folder: Of the file of rows.
        batch_size: Rows a rollout (`--rollout-batch-size`).
    """

    def __init__(self, source: DataSource[Sample], engines: WorkerGroup, folder: Path, batch_size: int) -> None:
        self.source, self.engines, self.folder, self.batch_size = source, engines, folder, batch_size
        self._encoded: OrderedDict[tuple[str, Path], EncodedPicture] = OrderedDict()
        self._bytes = 0

    async def __call__(self, rollout_id: int) -> RolloutResult[Sample]:
        """One batch; its metrics include `perf/rollout_time`."""
        started = time.perf_counter()
        groups = self.source.get_samples(self.batch_size)
        samples = [sample for group in groups for sample in group]
        keys = [(str(sample.prompt), picture_path(sample.label, self.folder)) for sample in samples]
        new = [key for key in dict.fromkeys(keys) if key not in self._encoded]
        encoded = dict(self._encoded)
        encoded |= zip(new, await asyncio.to_thread(self._encode, new), strict=True)
        for sample, key in zip(samples, keys, strict=True):
            _fill(sample, encoded[key])
        self._remember({key: encoded[key] for key in new})
        seconds = time.perf_counter() - started
        metrics = {
            "perf/rollout_time": seconds,
            "perf/reward_time": 0.0,
            "perf/images_per_s": len(samples) / seconds,
            "rollout/newly_encoded": float(len(new)),
        }
        return RolloutResult(groups, metrics=metrics, generate_seconds=seconds)

    def _encode(self, keys: Sequence[tuple[str, Path]]) -> list[EncodedPicture]:
        shares = np.array_split(np.arange(len(keys)), self.engines.size)
        batches = [([keys[i][0] for i in share], [read_picture(keys[i][1]) for i in share]) for share in shares]
        return [picture for answer in self.engines.call_each("encode", batches) for picture in answer]

    def _remember(self, pictures: dict[tuple[str, Path], EncodedPicture]) -> None:
        for key, picture in pictures.items():
            self._encoded[key] = picture
            self._bytes += picture.num_bytes
        while self._bytes > MAX_CACHED_BYTES:
            self._bytes -= self._encoded.popitem(last=False)[1].num_bytes


def _fill(sample: Sample, picture: EncodedPicture) -> None:
    """The sample's trajectory has no steps, only its end: the picture's latents."""
    none = np.empty(0, dtype=np.float32)
    sample.conditions = picture.conditions
    sample.trajectory = Trajectory(none, none, picture.clean[None], latent_indices=(0,), sde_steps=(), log_probs=none)
    sample.status = Status.COMPLETED
