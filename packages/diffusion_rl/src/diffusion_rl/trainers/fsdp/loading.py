"""From a diffusers directory to a sharded transformer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from diffusion_rl.models.family import ModelFamily
from diffusion_rl.models.loading import ModelBackend
from shared_runtime.precision.overrides import Patterns, overridden_modules, param_dtypes
from shared_runtime.precision.policy import PrecisionPolicy
from shared_runtime.training.distributed import RankContext
from shared_runtime.training.fsdp import disable_dropout, find_blocks, spread_model


def load_transformer(
    directory: Path,
    family: ModelFamily,
    backend: ModelBackend,
    component: str,
    context: RankContext,
    precision: PrecisionPolicy,
    *,
    gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    trainable: bool = True,
    adapt: Callable[[nn.Module], None] | None = None,
    param_dtype_patterns: Patterns = (),
) -> nn.Module:
    """Read a component on rank 0 and spread its shards over the ranks; the other ranks read only its config.

    Args:
        directory: diffusers directory.
        family: What it must be.
        backend: Who reads it.
        component: Such as `transformer`.
        context: This rank.
        precision: Dtypes.
        gradient_checkpointing: Recompute activations in the backward pass.
        cpu_offload: Keep shards on the host.
        trainable: `False` freezes it.
        adapt: Called with the whole model before it is sharded, to freeze parts of it or give it adapters.
        param_dtype_patterns: Parameters that compute in a dtype of their own, by the names of the plain model.

    Raises:
        DtypeOverrideError: If a pattern matches nothing, or only a part of what is cast together.
        FamilyError: If the checkpoint is not of this family, or has no such component.
    """
    if context.rank == 0:
        model = backend.load_component(str(directory), family, component, dtype=precision.master)
    else:
        model = backend.meta_component(str(directory), family, component).to(precision.master).to_empty(device="cpu")
    # A loaded component may keep parts in float32; every master weight has one dtype here.
    model = model.to(precision.master)
    disable_dropout(model)
    model.train(trainable)
    model.requires_grad_(trainable)
    own_dtypes = param_dtypes([name for name, _ in model.named_parameters()], param_dtype_patterns, precision.compute)
    overrides = overridden_modules(model, own_dtypes)  # before adapters rename parameters
    if adapt is not None:
        adapt(model)
    if gradient_checkpointing and trainable:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    return spread_model(
        model,
        context,
        precision,
        blocks=find_blocks(model, family.block_modules),
        cpu_offload=cpu_offload,
        cast_forward_inputs=False,  # the family's input dtype policy has the last word at the transformer's border
        overrides=overrides,
    )
