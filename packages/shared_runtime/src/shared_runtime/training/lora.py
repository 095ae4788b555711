"""Low-rank adapters (arXiv 2106.09685) by PEFT: y = W·x + (alpha/r)·B·A·x, where only A and B train.

PEFT puts the layer's own weight under `base_layer` and the adapter under `lora_A.default` and `lora_B.default`. Those
names stay inside the trainer: :func:`merged_tensors` gives the weights the names of the plain model again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

LoraInit = Literal["gaussian", "kaiming-uniform"]

_BASE, _A, _B, _ADAPTER = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight", ".default."


class LoraError(ValueError):
    """Adapters that can't be made; the message says which flag and why."""


@dataclass(frozen=True)
class LoraWeight:
    """The weight of an adapted layer as the plain model would hold it, computed when it is needed.

    Attributes:
        base: (out, in), W.
        a: (r, in).
        b: (out, r).
        scaling: alpha/r.
    """

    base: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + (alpha/r)·B·A in W's dtype and sharding. Every rank must call. W itself is left as it is."""
        a = self.a
        if isinstance(a, DTensor):  # rows of B and W are on this rank, but all of A is needed
            a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
        return self.base + (self.b @ a) * self.scaling


def matched_layers(module: nn.Module, target_modules: Sequence[str], flag: str = "--lora-target-modules") -> list[str]:
    """Names of the linear layers that end in one of the targets, as PEFT matches them.

    Args:
        module: The plain model; may be on the meta device.
        target_modules: Whole names or their last parts, such as `attn.to_q`.
        flag: Where the user gave them, for messages.

    Raises:
        LoraError: If there is no target, or one matches no linear layer; all of those are listed.
    """
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not target_modules:
        raise LoraError(f"{flag} names no layer")
    idle = [target for target in target_modules if not any(_matches(name, [target]) for name in linear)]
    if idle:
        raise LoraError(
            f"{flag} {' '.join(idle)}: no linear layer of {type(module).__name__} has that name or ends "
            f"in it; its layers end in {', '.join(_endings(linear))}"
        )
    return [name for name in linear if _matches(name, target_modules)]


def add_adapters(
    module: nn.Module,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    init_weights: LoraInit = "gaussian",
    seed: int = 0,
) -> None:
    """Freeze the model and give its target layers adapters that change nothing yet (B = 0), in place.

    Args:
        module: The plain model, before it is sharded.
        rank: r.
        alpha: The adapter's output is scaled by alpha/r.
        target_modules: See :func:`matched_layers`.
        init_weights: Of A: normal with deviation 1/r, or PEFT's default.
        seed: Of A. The draws depend on nothing else.

    Raises:
        LoraError: See :func:`matched_layers`.
        ImportError: Without PEFT; the message names the extra.
    """
    matched_layers(module, target_modules)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(
            f"LoRA needs {error.name}: install the extra with `uv pip install 'tandem-shared-runtime[peft]'`."
        ) from error
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            target_modules=list(target_modules),
            init_lora_weights="gaussian" if init_weights == "gaussian" else True,
        )
        inject_adapter_in_model(config, module)


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries that are A or B, under their own names."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith((_A, _B))}


def adapter_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A and B by the names of an adapter file: `blocks.0.to_q.lora_A.weight`."""
    return {name.replace(_ADAPTER, "."): tensor for name, tensor in adapter_tensors(tensors).items()}


def merged_tensors(tensors: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor | LoraWeight]:
    """Parameters of an adapted model by the names of the plain one, adapted weights as :class:`LoraWeight`.

    Args:
        tensors: All parameters by name.
        scaling: alpha/r.
    """
    merged: dict[str, Tensor | LoraWeight] = {}
    for name, tensor in tensors.items():
        if name.endswith((_A, _B)):
            continue
        layer, _, leaf = name.rpartition(_BASE)
        if not layer:
            merged[name] = tensor
        elif leaf == "weight" and layer + _A in tensors:
            merged[f"{layer}.weight"] = LoraWeight(tensor, tensors[layer + _A], tensors[layer + _B], scaling)
        else:
            merged[f"{layer}.{leaf}"] = tensor
    return merged


@contextlib.contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """The model computes without its adapters inside the block.

    PEFT's own switch also flips `requires_grad`, which FSDP2 copies to its gathered parameters when it first sees
    them: adapters that were off then would never train. This only takes them out of the forward pass.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _matches(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _endings(names: Iterable[str]) -> list[str]:
    """The last two parts of names, each once: enough to tell the layers of a block apart."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})
