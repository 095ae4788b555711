"""Loading a diffusers checkpoint, whole for the engine or its transformer alone for the trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from diffusion_rl.models.family import ModelFamily
from diffusion_rl.models.registry import FamilyError, check_checkpoint
from shared_runtime.training.memory import count_parameters


class ModelBackend(Protocol):
    """Who loads pipelines and components: this module, or a class given to `--model-backend-path`."""

    def load_pipeline(
        self,
        checkpoint: str,
        family: ModelFamily,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        component_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Any:
        """As :func:`load_pipeline`, for the local engine."""

    def load_component(self, checkpoint: str, family: ModelFamily, component: str, *, dtype: torch.dtype) -> Any:
        """As :func:`load_component`, for rank 0 of the trainer."""

    def meta_component(self, checkpoint: str, family: ModelFamily, component: str) -> Any:
        """As :func:`meta_component`, for the checks and for the trainer's other ranks."""


def model_backend(cls: type[ModelBackend] | None) -> ModelBackend:
    """An instance of the user's class, or this module."""
    return cls() if cls is not None else sys.modules[__name__]  # type: ignore[return-value]


def load_pipeline(
    checkpoint: str,
    family: ModelFamily,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    component_dtypes: Mapping[str, torch.dtype] | None = None,
    **options: Any,
) -> Any:
    """The diffusers pipeline, frozen, in evaluation mode.

    Args:
        checkpoint: Directory, or a name on the hub.
        family: What it must be.
        device: Where to put it.
        dtype: Of every module.
        component_dtypes: Of single modules, by component name.
        options: Further arguments of `from_pretrained`.

    Raises:
        FamilyError: If the checkpoint is not of this family or not complete.
    """
    import diffusers

    check_checkpoint(checkpoint, family)
    dtypes = {"default": dtype, **(component_dtypes or {})}
    load = getattr(diffusers, family.pipeline_classes[0]).from_pretrained
    pipeline = load(checkpoint, torch_dtype=dtypes, **options)
    pipeline.set_progress_bar_config(disable=True)
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval()
    return pipeline.to(device)


def load_component(
    checkpoint: str, family: ModelFamily, component: str, *, dtype: torch.dtype, **options: Any
) -> torch.nn.Module:
    """One module of a local checkpoint, such as `transformer`, by the class that `model_index.json` names.

    `options` are further arguments of `from_pretrained`.

    Raises:
        FamilyError: If the checkpoint is not of this family, or has no such module.
    """
    module = _component_class(checkpoint, family, component)
    return module.from_pretrained(checkpoint, subfolder=component, torch_dtype=dtype, **options)


def meta_component(checkpoint: str, family: ModelFamily, component: str) -> torch.nn.Module:
    """The same module without its weights: everything is on the meta device.

    Raises:
        FamilyError: As for :func:`load_component`.
    """
    with torch.device("meta"):
        return _component_class(checkpoint, family, component).from_config(component_config(checkpoint, component))


def _component_class(checkpoint: str, family: ModelFamily, component: str) -> Any:
    import importlib

    check_checkpoint(checkpoint, family)
    index = json.loads((Path(checkpoint) / "model_index.json").read_text(encoding="utf-8"))
    if index.get(component) in (None, [None, None]):
        raise FamilyError(f"--hf-checkpoint {checkpoint} has no component {component!r}")
    library, name = index[component]
    return getattr(importlib.import_module(library), name)


def component_config(checkpoint: str, component: str) -> dict[str, Any]:
    """A component's `config.json`, read without loading it."""
    return json.loads((Path(checkpoint) / component / "config.json").read_text(encoding="utf-8"))


def component_parameters(checkpoint: str) -> dict[str, int]:
    """Parameters of each component that has weights in safetensors files, read without loading them."""
    index = json.loads((Path(checkpoint) / "model_index.json").read_text(encoding="utf-8"))
    counts = {name: count_parameters(Path(checkpoint) / name) for name in index if not name.startswith("_")}
    return {name: count for name, count in counts.items() if count is not None}


def check_size(checkpoint: str, family: ModelFamily, height: int, width: int) -> None:
    """Refuse a picture size that the VAE and the patches can't divide.

    Raises:
        ValueError: The message has the nearest sizes that fit.
    """
    vae, transformer = (component_config(checkpoint, name) for name in ("vae", "transformer"))
    multiple = family.size_multiple(vae, transformer)
    for flag, size in (("--diffusion-height", height), ("--diffusion-width", width)):
        if size < multiple or size % multiple:
            below, above = max(size // multiple, 1) * multiple, (size // multiple + 1) * multiple
            near = f"{below} or {above}" if below != above else f"{below}"
            raise ValueError(f"{flag} {size} must be a multiple of {multiple} for this checkpoint: {near}")
