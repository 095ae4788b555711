"""From a Hugging Face directory to a sharded model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    value_head: bool = False,
    adapt: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Read a causal language model (or a value model) on rank 0 and spread its shards over the ranks.

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
        value_head: A scalar head in place of the language model's: a token classifier with a single label. Where the
            directory has no such head, it starts at zero, and so do all values.
        adapt: Called with the whole model before it is sharded, to freeze it and give it adapters.

    Raises:
        ValueError: If the architecture can't run packed, or the directory lacks weights of a value model's backbone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    register_packed_attention()
    config = AutoConfig.from_pretrained(directory, **({"num_labels": 1} if value_head else {}))
    options = {"config": config, "dtype": precision.master, "attn_implementation": attn_implementation}
    if context.rank == 0:
        read = _read_value_model if value_head else AutoModelForCausalLM.from_pretrained
        model = read(directory, **options)
    else:
        with torch.device("meta"):
            model = (AutoModelForTokenClassification if value_head else AutoModelForCausalLM).from_config(**options)
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
    if adapt is not None:
        adapt(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = find_blocks(model, model._no_split_modules or None)
    spread_model(model, context, precision, blocks=blocks, cpu_offload=cpu_offload)
    return model


def _read_value_model(directory: Path, **options: Any) -> PreTrainedModel:
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging

    # FSDP warns of in-place operations on a view; what reads the values does none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a head that is missing is what is expected
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(directory, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(report["missing_keys"])
    foreign = [name for name in missing if not name.startswith("score.")]
    if foreign:
        raise ValueError(f"{directory} lacks {', '.join(foreign)}: it holds no model of {type(model).__name__}'s kind")
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
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
