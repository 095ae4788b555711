"""The trained model as a Hugging Face directory."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shared_runtime.training.weights import PublishDtypes, gather_tensors, model_tensors, unsharded_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files of a tokenizer or processor, which belong to an exported directory but aren't written by the model.
_COMPANIONS = ("token", "vocab", "merges", "special_", "added_", "chat_template", "preprocessor", "processor", "spiece")


def save_hf(model: PreTrainedModel, source: Path, directory: Path, dtype: torch.dtype, *, keep: bool) -> None:
    """Write config, weights and tokenizer as an ordinary Hugging Face directory; rank 0 (`keep`) writes."""
    tensors = model_tensors(model)
    gathered = gather_tensors(tensors, tuple(tensors), PublishDtypes(dtype), keep=keep)
    state = {name: tensor.cpu().clone() for name, tensor in gathered}
    if not keep:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _plain_copy(model, dtype).save_pretrained(directory, state_dict=state)
    for file in source.iterdir():
        if file.is_file() and file.name.startswith(_COMPANIONS):
            shutil.copy2(file, directory / file.name)


def _plain_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same architecture without weights and without sharding, for `save_pretrained`."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        plain: Any = unsharded_class(model)(config)
    plain = plain.to(dtype)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain
