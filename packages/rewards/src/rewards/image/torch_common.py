"""What the scorers that run a CLIP model share: the device, batches, features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rewards.image.pixels import Frame, request_frames
from rewards.request import RewardRequest

if TYPE_CHECKING:
    import torch


def choose_device(device: str | None) -> str:
    """The device named, or the first GPU, or the CPU."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(dtype: str | None) -> torch.dtype:
    """A `torch.dtype` by name; float32 by default: scores of a batch must not depend on its size."""
    import torch

    found = getattr(torch, dtype or "float32", None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}: float32, bfloat16 or float16")
    return found


def unit_features(output: Any) -> torch.Tensor:
    """Features (N, D) in float32 with length 1, from what a CLIP model returned."""
    import torch

    features = output if isinstance(output, torch.Tensor) else output.pooler_output
    return torch.nn.functional.normalize(features.float(), dim=-1)


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Runs of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def mean_over_frames(
    requests: Sequence[RewardRequest],
    num_frames: int | None,
    batch_size: int,
    score_batch: Callable[[list[Frame], list[int]], torch.Tensor],
) -> list[float]:
    """Score every frame of every request in batches, and average over the frames of each request.

    Args:
        requests: Requests with an image or a video.
        num_frames: Frames of a video that are scored; `None` for all.
        batch_size: Frames a batch.
        score_batch: Scores (N,) of N frames, given with the index of the request that each belongs to.
    """
    owned = [(frame, i) for i, request in enumerate(requests) for frame in request_frames(request, num_frames)]
    totals, counts = [0.0] * len(requests), [0] * len(requests)
    for batch in batches(owned, batch_size):
        scores = score_batch([frame for frame, _ in batch], [owner for _, owner in batch])
        for (_, owner), value in zip(batch, scores.tolist(), strict=True):
            totals[owner] += value
            counts[owner] += 1
    return [total / count for total, count in zip(totals, counts, strict=True)]
