"""Filters over finished groups: which ones are trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)


@dataclass(frozen=True)
class FilterOutput:
    """What a dynamic sampling filter says of one group.

    Attributes:
        keep: Train on it.
        reason: Why not; counted as `rollout/dynamic_filter/drop_<reason>`.
    """

    keep: bool
    reason: str | None = None


DynamicFilter = Callable[..., FilterOutput | bool]


def check_reward_nonzero_std(args: Any, samples: list[S], **kwargs: Any) -> FilterOutput:
    """Keep a group whose raw rewards are not all equal: one that is has no advantage to learn from (DAPO).

    The raw reward is looked at, not a shaped or normalised one. Equality is exact, so that rounding in a mean can't
    keep a group of equal rewards.

    Args:
        args: The run's flat arguments; `reward_key` picks the entry of a dict reward.
        samples: One group, scored.
    """
    key = getattr(args, "reward_key", None)
    rewards = [sample.scalar_reward(key) for sample in samples]
    if any(reward != rewards[0] for reward in rewards[1:]):
        return FilterOutput(True)
    return FilterOutput(False, f"zero_std_{round(rewards[0], 1):g}" if rewards else "empty")


def apply_filter(function: DynamicFilter, args: Any, group: list[S]) -> FilterOutput:
    """Call a filter; a plain `bool` is taken too.

    Raises:
        TypeError: If it returns something else.
    """
    result = function(args, group)
    if isinstance(result, bool):
        return FilterOutput(result)
    # Other libraries' result types are taken by shape.
    if not isinstance(getattr(result, "keep", None), bool):
        raise TypeError(f"--dynamic-sampling-filter-path returned {result!r}, not FilterOutput(keep, reason) or bool")
    return FilterOutput(result.keep, getattr(result, "reason", None))
