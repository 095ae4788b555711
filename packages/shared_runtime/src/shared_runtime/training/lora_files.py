"""Adapters that somebody has trained: reading a PEFT directory, and putting it on a model or into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from shared_runtime.training.lora import LoraError, adapter_names, adapter_tensors

_CONFIG, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_DIFFUSERS, _METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
_REFUSED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter directory says of itself.

    Attributes:
        rank: r.
        alpha: The adapters count alpha / r times.
    """

    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def read_adapter_config(directory: Path, flag: str, *, component: str | None = None) -> AdapterConfig:
    """Rank and alpha of a directory that PEFT's `save_pretrained` wrote, or diffusers' `save_lora_weights`.

    Args:
        directory: With `adapter_config.json` and `adapter_model.safetensors`, or `pytorch_lora_weights.safetensors`.
        flag: Where the user gave it, for messages.
        component: The adapted module, by which diffusers names its tensors.

    Raises:
        LoraError: If it holds no adapters, or others than plain low-rank ones of a single rank and alpha.
    """
    if (directory / _CONFIG).is_file() and (directory / _WEIGHTS).is_file():
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    elif component is not None and (directory / _DIFFUSERS).is_file():
        config = _diffusers_config(directory / _DIFFUSERS, component, flag)
    else:
        raise LoraError(
            f"{flag} {directory} holds no adapters: it needs {_CONFIG} and {_WEIGHTS}, as PEFT's save_pretrained "
            "writes them"
        )
    odd = [name for name in _REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise LoraError(f"{flag} {directory} has {', '.join(odd)}, and only plain LoRA of one rank can be trained")
    return AdapterConfig(int(config["r"]), float(config["lora_alpha"]))


def check_adapter_config(config: AdapterConfig, rank: int, alpha: float, flag: str) -> None:
    """Refuse adapters of another size than the run's.

    Raises:
        LoraError: With the flags that fit.
    """
    if (config.rank, config.alpha) != (rank, alpha):
        raise LoraError(
            f"{flag} holds adapters of rank {config.rank} and alpha {config.alpha:g}: give --lora-rank {config.rank} "
            f"--lora-alpha {config.alpha:g}, not {rank} and {alpha:g}"
        )


def read_adapters(directory: Path, *, component: str | None = None) -> dict[str, Tensor]:
    """A and B by the names of :func:`shared_runtime.training.lora.adapter_names`, in the file's dtype.

    Args:
        directory: One that :func:`read_adapter_config` accepts.
        component: As there.
    """
    if (directory / _WEIGHTS).is_file():
        return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / _WEIGHTS).items()}
    tensors = load_file(directory / _DIFFUSERS)
    return {name.removeprefix(f"{component}."): t for name, t in tensors.items() if name.startswith(f"{component}.")}


@torch.no_grad()
def load_adapters(module: nn.Module, stored: Mapping[str, Tensor], flag: str) -> None:
    """Copy stored adapters over those that a model has, in place, before it is sharded.

    Raises:
        LoraError: If the adapted layers are others than the stored ones, or have other shapes.
    """
    parameters = adapter_tensors(dict(module.named_parameters()))
    held = adapter_names(parameters)
    if held.keys() != stored.keys():
        missing, foreign = sorted(held.keys() - stored.keys()), sorted(stored.keys() - held.keys())
        raise LoraError(
            f"{flag} adapts other layers than this run, which has {_list(missing)} more and {_list(foreign)} less: "
            "give the targets that it was trained with"
        )
    odd = [name for name, tensor in held.items() if tensor.shape != stored[name].shape]
    if odd:
        raise LoraError(f"{flag} is of another model: {_list(odd)} have other shapes")
    for name, tensor in held.items():
        tensor.copy_(stored[name])


@torch.no_grad()
def merge_adapters(module: nn.Module, stored: Mapping[str, Tensor], scaling: float, flag: str) -> None:
    """Add stored adapters to the plain weights they adapt: W + scaling·B·A, in place, before it is sharded.

    Raises:
        LoraError: If a layer isn't there, or has another shape.
    """
    parameters: dict[str, Any] = dict(module.named_parameters())
    for name in sorted(stored):
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        weight, a, b = parameters.get(f"{layer}.weight"), stored[name], stored[f"{layer}.lora_B.weight"]
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            raise LoraError(f"{flag} is of another model: {layer} is not there, or has another shape")
        weight.add_((b.to(weight.dtype) @ a.to(weight.dtype)) * scaling)


def _diffusers_config(file: Path, component: str, flag: str) -> dict[str, Any]:
    with safe_open(file, framework="pt") as stream:
        metadata = json.loads((stream.metadata() or {}).get(_METADATA, "{}"))
    config = {
        name.removeprefix(f"{component}."): value
        for name, value in metadata.items()
        if name.startswith(f"{component}.")
    }
    if "r" not in config or "lora_alpha" not in config:
        raise LoraError(f"{flag} {file} does not say the rank and alpha of its {component} adapters")
    return config


def _list(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
