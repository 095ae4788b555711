"""From a Hugging Face directory to a sharded model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm_rl.trainers.fsdp.attention import PACKED, register_packed_attention
from llm_rl.trainers.fsdp.forward import is_packed
from shared_runtime.precision.policy import PrecisionPolicy
from shared_runtime.training.distributed import RankContext
from shared_runtime.training.fsdp import disable_dropout, find_blocks, spread_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def choose_attention(requested: str | None, device: torch.device) -> str:
    """The attention implementation: what was asked for, else a packed one that this device has."""
    if requested is not None:
        return requested
    if device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return PACKED


def load_model(
    directory: Path,
    context: RankContext,
    precision: PrecisionPolicy,
    *,
    attn_implementation: str,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    trainable: bool = True,
) -> PreTrainedModel:
    """Read a causal language model on rank 0 and spread its shards over the ranks.

    Only rank 0 reads the files, so the host holds one full copy; the others allocate memory that is never written but
    for their shards.

    Args:
        directory: Hugging Face directory.
        context: This rank.
        precision: Dtypes.
        attn_implementation: See :func:`choose_attention`.
        gradient_checkpointing: Recompute activations in the backward pass.
        cpu_offload: Keep shards on the host.
        trainable: `False` freezes it.

    Raises:
        ValueError: If the architecture can't run packed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    register_packed_attention()
    options = {"dtype": precision.master, "attn_implementation": attn_implementation}
    if context.rank == 0:
        model = AutoModelForCausalLM.from_pretrained(directory, **options)
    else:
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
        model = model.to_empty(device="cpu")
        model.tie_weights()
    if is_packed(attn_implementation):
        _require_packable(model, attn_implementation)
    disable_dropout(model)
    for name in ("attention_dropout", "attn_pdrop", "hidden_dropout"):
        if getattr(model.config, name, 0.0):
            setattr(model.config, name, 0.0)
    model.train(trainable)
    model.requires_grad_(trainable)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = find_blocks(model, model._no_split_modules or None)
    spread_model(model, context, precision, blocks=blocks, cpu_offload=cpu_offload)
    return model


def _require_packable(model: PreTrainedModel, attn_implementation: str) -> None:
    """Raise for an architecture whose layers would carry state from one packed document into the next."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    foreign = kinds - {"full_attention", "sliding_attention"}
    if not model._supports_attention_backend or foreign:
        reason = f"has {', '.join(sorted(foreign))} layers" if foreign else "does not take attention kernels"
        raise ValueError(
            f"{type(model).__name__} {reason}, so documents can't be packed with {attn_implementation}; "
            "use --attn-implementation sdpa, which pads"
        )
