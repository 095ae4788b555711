"""The noise levels of diffusers' flow-matching scheduler, without its mutable state leaking out."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffusion_rl.models.family import Schedule


def flow_schedule(
    scheduler: Any,
    num_steps: int,
    *,
    flow_shift: float | None = None,
    image_seq_len: int | None = None,
    sigmas: np.ndarray | None = None,
) -> Schedule:
    """The grid that `FlowMatchEulerDiscreteScheduler.set_timesteps` gives.

    Args:
        scheduler: Any instance; it is not changed.
        num_steps: T.
        flow_shift: Overrides the checkpoint's shift (and its resolution-dependent one).
        image_seq_len: Tokens of a picture, for checkpoints with a resolution-dependent shift.
        sigmas: (T,) before shifting, default the scheduler's own.

    Raises:
        ValueError: If T is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"--diffusion-num-steps must be at least 1, not {num_steps}")
    changes: dict[str, Any] = {} if flow_shift is None else {"shift": flow_shift, "use_dynamic_shifting": False}
    own = type(scheduler).from_config(scheduler.config, **changes)
    arguments: dict[str, Any] = {}
    if own.config.use_dynamic_shifting:
        if image_seq_len is None:
            raise ValueError("this checkpoint's schedule depends on the resolution: image_seq_len is missing")
        arguments["mu"] = resolution_shift(own.config, image_seq_len)
    if sigmas is None:
        own.set_timesteps(num_steps, **arguments)
    else:
        own.set_timesteps(sigmas=sigmas, **arguments)
    return Schedule(sigmas=own.sigmas.clone(), timesteps=own.timesteps.clone())


def resolution_shift(config: Any, image_seq_len: int) -> float:
    """μ of dynamic shifting: linear in the number of tokens between the two points that the config names."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return base + (image_seq_len - low) * (top - base) / (high - low)
