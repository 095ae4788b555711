"""The reward of a response: built-in graders in batches, or the user's function in any of its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_rl.sample import Sample
from rewards import RewardRequest
from rewards.each import row_problem, score_each
from shared_runtime.config import RewardPoolConfig
from shared_runtime.data.prompts import PromptRow
from shared_runtime.rollout.scoring import GROUP_REWARD_HOOK, POOL_BATCHES, SAMPLE_REWARD_HOOK, SampleScorer

if TYPE_CHECKING:
    from rewards.pool import RewardPool

__all__ = [
    "GROUP_REWARD_HOOK",
    "SAMPLE_REWARD_HOOK",
    "RewardScorer",
    "reward_options",
    "reward_pool",
    "reward_request",
    "row_check",
]


class RewardScorer(SampleScorer[Sample]):
    """Scores samples, or with `group_rm` groups.

    Args:
        rm_type: Built-in reward; a sample's `metadata["rm_type"]` goes before it.
        custom: The user's function instead: `(args, sample)`, or `(args, samples)` with `group_rm`.
        group_rm: Call `custom` once a group.
        args: Passed to `custom`.
        options: Keyword arguments of built-in rewards by name, such as `{"remote_rm": {"url": …}}`.
        pool: A `rewards.pool.RewardPool` that scores in place of threads of this process.
    """

    def __init__(
        self,
        *,
        rm_type: str | None = None,
        custom: Callable[..., Any] | None = None,
        group_rm: bool = False,
        args: Any = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        pool: Any = None,
    ) -> None:
        score = partial(score_each, rm_type=rm_type, options=options) if pool is None else pool.score_each
        super().__init__(
            built_in=lambda samples: score([reward_request(s) for s in samples]),
            custom=custom,
            unit="group" if group_rm else "sample",
            args=args,
            max_workers=2 if pool is None else POOL_BATCHES,
            pop_metrics=dict if pool is None else pool.pop_metrics,
        )


def reward_options(rm_url: str | None) -> dict[str, dict[str, Any]] | None:
    """Options of built-in rewards: the address of the reward service (`--rm-url`)."""
    return {"remote_rm": {"url": rm_url}} if rm_url else None


def reward_pool(
    rm_type: str, config: RewardPoolConfig, options: Mapping[str, Mapping[str, Any]] | None, **placement: Any
) -> RewardPool:
    """Ray workers that score; `placement` is what `rewards.pool.RewardPool` takes to place them."""
    from rewards.pool import RewardPool

    return RewardPool(
        rm_type,
        options=options,
        num_workers=config.reward_num_workers,
        batch_size=config.reward_batch_size,
        **placement,
    )


def reward_request(sample: Sample) -> RewardRequest:
    """What a built-in reward reads of a sample; chat prompts give the last user message."""
    prompt = sample.prompt
    if not isinstance(prompt, str):
        users = [m.get("content") for m in prompt if m.get("role") == "user"]
        prompt = users[-1] if users and isinstance(users[-1], str) else ""
    return RewardRequest(
        response=sample.response,
        label=sample.label,
        prompt=prompt,
        metadata=sample.metadata,
        sample_id=sample.index,
        tokens=sample.tokens,
    )


def row_check(rm_type: str | None) -> Callable[[PromptRow], str | None]:
    """A check of prompt rows for the built-in rewards: a reward that exists, and a label where it needs one."""
    return lambda row: row_problem(rm_type, row.label, row.metadata)
