"""The trained model as a diffusers directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_runtime.training.weights import gather_tensors, unsharded_class


def save_pipeline(
    model: Any,
    tensors: Mapping[str, Tensor],
    source: Path,
    component: str,
    directory: Path,
    dtype: torch.dtype,
    *,
    keep: bool,
) -> None:
    """Write the pipeline with the trained component; rank 0 (`keep`) writes.

    Args:
        model: The sharded component.
        tensors: Its parameters.
        source: The pipeline's directory, of which everything else is copied.
        component: Its name in there.
        directory: Where to write.
        dtype: Of its weights.
        keep: Whether this rank writes.
    """
    state = {name: t.cpu().clone() for name, t in gather_tensors(tensors, tuple(tensors), dtype, keep=keep)}
    if not keep:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(component))
    plain: Any = unsharded_class(model).from_config(model.config)  # type: ignore[attr-defined]
    plain = plain.to(dtype)
    lost = plain.load_state_dict(state, strict=False)
    if lost.unexpected_keys:
        raise KeyError(f"{type(plain).__name__} has no tensors named {', '.join(lost.unexpected_keys)}")
    plain.save_pretrained(directory / component)
