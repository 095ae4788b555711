"""The model, and who trains and serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The model and who trains and serves it."""

    hf_checkpoint: Path | None = None
    """Hugging Face directory: tokenizer, config and weights."""
    ref_load: Path | None = None
    """Hugging Face directory of the frozen reference. Unset: --hf-checkpoint."""
    train_backend: Literal["fsdp"] = "fsdp"
    """Trainer backend."""
    rollout_engine: Literal["local"] = "local"
    """Rollout engine; local runs the Hugging Face model in a worker process."""
    rollout_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the engine's weights. Unset: --train-dtype."""
    rollout_max_batch_size: int = 512
    """Sequences that the local engine generates at once."""
    update_weights_interval: int = 1
    """Rollouts between weight updates; above 1 rollouts lag behind the trained weights, evaluations in between too."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Largest bucket of a weight update, in bytes."""
    check_weight_update_equal: bool = False
    """Compare a checksum of every tensor after every update."""
