"""The reward of an image: built-in scorers in batches, or the user's function on a microgroup or a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion_rl.sample import Sample
from rewards import LabelError, RewardRequest
from rewards.each import row_problem, score_each
from shared_runtime.config import RewardPoolConfig
from shared_runtime.data.prompts import PromptRow
from shared_runtime.rollout.scoring import POOL_BATCHES, SampleScorer

if TYPE_CHECKING:
    from rewards.pool import RewardPool


class RewardScorer(SampleScorer[Sample]):
    """Scores images as soon as their microgroup is there.

    Args:
        rm_type: Built-in reward; a sample's `metadata["rm_type"]` goes before it.
        custom: The user's function instead, `(args, samples) -> list`, called once a microgroup.
        group_rm: Call `custom` once a group.
        args: Passed to `custom`.
        options: Keyword arguments of built-in rewards by name, such as `{"ocr": {"engine": "paddleocr"}}`.
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
            built_in=lambda samples: score([reward_request(sample) for sample in samples]),
            custom=custom,
            unit="group" if group_rm else "microgroup",
            args=args,
            max_workers=2 if pool is None else POOL_BATCHES,
            pop_metrics=dict if pool is None else pool.pop_metrics,
        )


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
    """What a built-in reward reads of a sample."""
    return RewardRequest(
        label=sample.label,
        prompt=sample.prompt if isinstance(sample.prompt, str) else None,
        metadata=sample.metadata,
        image=sample.generated_output,
        sample_id=sample.index,
    )


def row_check(rm_type: str | None) -> Callable[[PromptRow], str | None]:
    """A check of prompt rows for the built-in rewards: one that scores images and can read the prompt."""

    def check(row: PromptRow) -> str | None:
        problem = row_problem(rm_type, row.label, row.metadata, modality="image")
        if problem is not None or not isinstance(row.prompt, str):
            return problem
        return _unreadable(row.metadata.get("rm_type") or rm_type, row.prompt)

    return check


def _unreadable(rm_type: str | None, prompt: str) -> str | None:
    """Why a reward that reads the prompt's words can't read these."""
    try:
        if rm_type == "ocr":
            from rewards.image.ocr import quoted_target

            quoted_target(RewardRequest(prompt=prompt))
        if rm_type == "shapes":
            from rewards.image.shapes import asked_properties

            asked_properties(prompt)
    except (LabelError, ValueError) as error:
        return str(error).removeprefix("sample None: ")  # the row is named already
    return None
