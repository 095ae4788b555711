"""The trained model as a diffusers directory, and its adapters as a file that diffusers loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from diffusion_rl.models.family import ModelFamily
from shared_runtime.training.lora import adapter_names
from shared_runtime.training.weights import PublishDtypes, Tensors, gather_tensors, unsharded_class


def save_pipeline(
    model: Any,
    tensors: Tensors,
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
        tensors: Its parameters by their plain names.
        source: The pipeline's directory, of which everything else is copied.
        component: Its name in there.
        directory: Where to write.
        dtype: Of its weights.
        keep: Whether this rank writes.
    """
    gathered = gather_tensors(tensors, tuple(tensors), PublishDtypes(dtype), keep=keep)
    state = {name: tensor.cpu().clone() for name, tensor in gathered}
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


def save_adapters(
    tensors: Mapping[str, Tensor],
    family: ModelFamily,
    component: str,
    directory: Path,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    keep: bool,
) -> None:
    """Write the adapters as `pipeline.load_lora_weights(directory)` reads them; rank 0 (`keep`) writes.

    Args:
        tensors: All parameters of the adapted component.
        family: Of the pipeline.
        component: Which of its modules is adapted.
        directory: Where to write.
        rank: r.
        alpha: The adapters count alpha / r times.
        target_modules: Ends of the names of adapted layers.
        keep: Whether this rank writes.
    """
    from peft import LoraConfig

    adapters = adapter_names(tensors)
    gathered = gather_tensors(adapters, tuple(adapters), PublishDtypes(torch.float32), keep=keep)
    state = {name: tensor.cpu().clone() for name, tensor in gathered}
    if not keep:
        return
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(target_modules)).to_dict()  # type: ignore[arg-type]
    metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    getattr(diffusers, family.pipeline_classes[0]).save_lora_weights(
        directory, **{f"{component}_lora_layers": state, f"{component}_lora_adapter_metadata": metadata}
    )
