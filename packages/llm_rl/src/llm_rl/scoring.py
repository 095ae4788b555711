"""The reward of a response: built-in graders in batches, or the user's function in any of its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llm_rl.sample import Sample
from rewards import RewardRequest
from rewards.each import row_problem, score_each
from shared_runtime.data.prompts import PromptRow
from shared_runtime.rollout.scoring import GROUP_REWARD_HOOK, SAMPLE_REWARD_HOOK, SampleScorer

__all__ = ["GROUP_REWARD_HOOK", "SAMPLE_REWARD_HOOK", "RewardScorer", "reward_request", "row_check"]


class RewardScorer(SampleScorer[Sample]):
    """Scores samples, or with `group_rm` groups.

    Args:
        rm_type: Built-in reward; a sample's `metadata["rm_type"]` goes before it.
        custom: The user's function instead: `(args, sample)`, or `(args, samples)` with `group_rm`.
        group_rm: Call `custom` once a group.
        args: Passed to `custom`.
        options: Keyword arguments of built-in rewards by name, such as `{"remote_rm": {"url": …}}`.
        max_workers: Batches that built-in graders work on at once.
    """

    def __init__(
        self,
        *,
        rm_type: str | None = None,
        custom: Callable[..., Any] | None = None,
        group_rm: bool = False,
        args: Any = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        max_workers: int = 2,
    ) -> None:
        super().__init__(
            built_in=lambda samples: score_each([reward_request(s) for s in samples], rm_type, options=options),
            custom=custom,
            group_rm=group_rm,
            args=args,
            max_workers=max_workers,
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
