"""The trained model as a Hugging Face directory, and its adapters as a PEFT one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_runtime.training.lora import adapter_names
from shared_runtime.training.weights import PublishDtypes, Tensors, gather_tensors, unsharded_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files of a tokenizer or processor, which belong to an exported directory but aren't written by the model.
_COMPANIONS = ("token", "vocab", "merges", "special_", "added_", "chat_template", "preprocessor", "processor", "spiece")


def save_hf(
    model: PreTrainedModel, tensors: Tensors, source: Path, directory: Path, dtype: torch.dtype, *, keep: bool
) -> None:
    """Write config, weights and tokenizer as an ordinary Hugging Face directory; rank 0 (`keep`) writes.

    Args:
        model: The sharded model.
        tensors: Its weights by the names of the plain model.
        source: Where its tokenizer is.
        directory: Where to write.
        dtype: Of the weights.
        keep: Whether this rank writes.
    """
    gathered = gather_tensors(tensors, tuple(tensors), PublishDtypes(dtype), keep=keep)
    state = {name: tensor.cpu().clone() for name, tensor in gathered}
    if not keep:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _plain_copy(model, dtype).save_pretrained(directory, state_dict=state)
    for file in source.iterdir():
        if file.is_file() and file.name.startswith(_COMPANIONS):
            shutil.copy2(file, directory / file.name)


def save_adapters(
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    base: Path,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    keep: bool,
) -> None:
    """Write the adapters in fp32 as `PeftModel.from_pretrained` reads them; rank 0 (`keep`) writes.

    Args:
        tensors: All parameters of the adapted model.
        directory: Where to write.
        base: The model that they adapt.
        rank: r.
        alpha: The adapters count alpha / r times.
        target_modules: Names of the adapted layers.
        keep: Whether this rank writes.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    adapters = adapter_names(tensors)
    gathered = gather_tensors(adapters, tuple(adapters), PublishDtypes(torch.float32), keep=keep)
    state = {f"base_model.model.{name}": tensor.cpu().clone() for name, tensor in gathered}
    if not keep:
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        inference_mode=True,
    )
    config.save_pretrained(str(directory))
    save_file(state, directory / "adapter_model.safetensors")


def _plain_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same architecture without weights and without sharding, for `save_pretrained`."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        plain: Any = unsharded_class(model)(config)
    plain = plain.to(dtype)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain
