"""The transformer's forward with guidance, the same for engine and trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffusion_rl.models.family import Guidance, ModelFamily, TensorConditions
from shared_runtime.precision.overrides import parse_patterns
from shared_runtime.precision.policy import torch_dtype


def cast_input(value: Tensor, policy: str | None, forward_dtype: torch.dtype) -> Tensor:
    """A tensor at the transformer's border: `None` as it comes, `"default"` the forward dtype, else the named one.

    Integer tensors (masks) stay as they are.

    Raises:
        ValueError: For an unknown policy.
    """
    if policy is None or not value.is_floating_point():
        return value
    return value.to(forward_dtype if policy == "default" else torch_dtype(policy))


def dtype_patterns(family: ModelFamily, words: Iterable[str]) -> list[tuple[str, str]]:
    """The family's per-parameter dtypes, then those of `--param-dtype-patterns`, in the order in which they apply.

    Raises:
        DtypeOverrideError: For a word that isn't `pattern=dtype`.
    """
    return [*family.param_dtype_patterns.items(), *parse_patterns(words)]


def predict_velocity(
    family: ModelFamily,
    transformer: Any,
    latents: Tensor,
    timesteps: Tensor,
    conditions: TensorConditions,
    negative_conditions: TensorConditions | None,
    guidance: Guidance,
    *,
    extra: Mapping[str, Any],
    forward_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The (guided) velocity, (B, ...), in the transformer's output dtype.

    Args:
        family: Says how.
        transformer: Called with `hidden_states`, `timestep` and the family's condition inputs.
        latents: (B, ...).
        timesteps: (B,), as the schedule has them; the family's scaling is applied here.
        conditions: Of the prompts, from `family.collate_conditions`.
        negative_conditions: Of the negative prompts; needed where guidance is active.
        guidance: Scale 1 or less: one branch only.
        extra: `family.forward_arguments` for a batch of B.
        forward_dtype: Autocast dtype; float32 means none.

    Raises:
        ValueError: If guidance is active and there are no negative conditions.
    """
    policy = family.input_dtype_policy
    hidden = cast_input(latents, policy["latents"], forward_dtype)
    steps = cast_input(timesteps, policy["timestep"], forward_dtype) / family.timestep_divisor
    positive = {name: cast_input(value, policy["cond"], forward_dtype) for name, value in conditions.items()}
    autocast = torch.autocast(latents.device.type, dtype=forward_dtype, enabled=forward_dtype != torch.float32)
    if not guidance.active:
        with autocast:
            return _forward(transformer, hidden, steps, positive, extra)
    if negative_conditions is None:
        raise ValueError(
            f"guidance scale {guidance.scale} needs the negative prompt's conditions, and the batch has none: "
            "sample with guidance, or with return_negative_conditions"
        )
    negative = {name: cast_input(value, policy["cond"], forward_dtype) for name, value in negative_conditions.items()}
    with autocast:
        if family.one_forward_guidance:
            both = {name: torch.cat([negative[name], positive[name]]) for name in positive}
            output = _forward(transformer, torch.cat([hidden] * 2), torch.cat([steps] * 2), both, _twice(extra))
            negative_velocity, positive_velocity = output.chunk(2)
        else:
            positive_velocity = _forward(transformer, hidden, steps, positive, extra)
            negative_velocity = _forward(transformer, hidden, steps, negative, extra)
        return family.combine_guidance(positive_velocity, negative_velocity, guidance)


def _forward(
    transformer: Any, hidden: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> Tensor:
    return transformer(hidden_states=hidden, timestep=timestep, **conditions, **extra, return_dict=False)[0]


def _twice(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Per-sample lists for a batch of both branches."""
    return {name: value * 2 if isinstance(value, list) else value for name, value in extra.items()}
