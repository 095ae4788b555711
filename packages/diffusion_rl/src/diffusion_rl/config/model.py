"""The pipeline, and how its transformer is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The pipeline and who trains and serves it."""

    hf_checkpoint: Path | None = None
    """diffusers directory of the pipeline."""
    diffusion_model_family: str | None = None
    """Family of the pipeline: sd3 or qwen_image. Unset: what the directory's name says."""
    train_pipeline_config_path: str | None = None
    """`package.module.Class` of a family of your own, a subclass of `diffusion_rl.models.family.ModelFamily`."""
    diffusion_task: str = "t2i"
    """Task of the family to train on."""
    ref_load: Path | None = None
    """diffusers directory of the frozen reference. Unset: --hf-checkpoint."""
    ref_lora_adapter_path: Path | None = None
    """Directory of adapters that are merged into the reference (--ref-mode ref)."""
    train_backend: Literal["fsdp"] = "fsdp"
    """Trainer backend."""
    rollout_engine: Literal["local"] = "local"
    """Rollout engine; local runs the pipeline's components in a worker process."""
    update_weight_target_module: str = "transformer"
    """The component that trains and is published."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Largest bucket of a weight update, in bytes."""
    check_weight_update_equal: bool = False
    """Compare a checksum of every tensor after every update."""


@dataclass(frozen=True)
class DiffusionFsdpConfig:
    """The FSDP2 trainer."""

    dp_replicate_size: int = 1
    """Replicas of the sharded model (hybrid sharding); must divide the number of trainer ranks."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    fsdp_cpu_backend: str = "gloo"
    """Process-group backend for CPU tensors."""
    fsdp_master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Sharded weights and optimizer state."""
    fsdp_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Gradient reduce-scatter."""
    diffusion_forward_dtype: Literal["bf16", "fp32"] = "bf16"
    """The transformer's forward, in trainer and local engine."""
    param_dtype_patterns: tuple[str, ...] = ()
    """Parameters that compute in a dtype of their own, in trainer and local engine, as `pattern=dtype`, such as
    *.norm_q.*=fp32; a later pattern overrides an earlier one, and these the family's."""
