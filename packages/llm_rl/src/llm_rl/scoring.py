"""The reward of a sample: built-in graders in batches, or the user's function in any of its forms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from llm_rl.sample import Sample
from rewards import RewardRequest, RewardServiceError, UnknownRewardError, needs_label, score
from shared_runtime.data.prompts import PromptRow
from shared_runtime.hooks import HookSpec, is_async
from shared_runtime.rollout.threads import ThreadBatcher, call_each

SAMPLE_REWARD_HOOK = HookSpec(("args", "sample"), is_async=None)
GROUP_REWARD_HOOK = HookSpec(("args", "samples"), is_async=None)

Reward = float | dict[str, Any]
_NAMED_SAMPLE = re.compile(r"\bsample (\d+)\b")
_MAX_SERVICE_ERRORS = 3


class RewardScorer:
    """Scores samples, or with `group_rm` groups.

    Everything blocking runs in a thread, one hop for all samples that are ready: built-in graders on up to
    `max_workers` batches at once, a user's ordinary function on one at a time, so it need not be thread-safe. A user's
    `async def` runs on the event loop.

    Attributes:
        score: The reward of one sample, or `None` with `group_rm`.
        score_group: The rewards of a group, or `None` without it.
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
        """Set up.

        Args:
            rm_type: Built-in reward; a sample's `metadata["rm_type"]` goes before it.
            custom: The user's function instead: `(args, sample)`, or `(args, samples)` with `group_rm`.
            group_rm: Call `custom` once a group.
            args: Passed to `custom`.
            options: Keyword arguments of built-in rewards by name, such as `{"remote_rm": {"url": …}}`.
            max_workers: Batches that built-in graders work on at once.
        """
        self.rm_type = rm_type
        self.options = options
        self.score: Callable[[Sample], Any] | None = None
        self.score_group: Callable[[list[Sample]], Any] | None = None
        self._batcher: ThreadBatcher[Any, Any] | None = None
        if custom is None:
            self._batcher = ThreadBatcher(self._score_builtin, max_workers)
            self.score = self._batcher.submit
        else:
            call = self._custom(custom, args)
            self.score, self.score_group = (None, call) if group_rm else (call, None)

    def close(self) -> None:
        """End the threads."""
        if self._batcher is not None:
            self._batcher.close()

    def _custom(self, custom: Callable[..., Any], args: Any) -> Callable[[Any], Any]:
        if is_async(custom):
            return lambda item: custom(args, item)

        def call(item: Any) -> Any:
            result = custom(args, item)
            if inspect.isawaitable(result):
                raise TypeError("--custom-rm-path returned an awaitable from an ordinary function; make it async def")
            return result

        self._batcher = ThreadBatcher(lambda items: call_each(call, items), max_workers=1)
        return self._batcher.submit

    def _score_builtin(self, samples: list[Sample]) -> list[Reward | BaseException]:
        """Score a batch; a sample that can't be scored fails alone."""
        requests = [reward_request(sample) for sample in samples]
        try:
            return list(score(requests, self.rm_type, options=self.options))
        except RewardServiceError as error:
            return self._without_failed(samples, requests, error)
        except Exception:
            return call_each(lambda request: score([request], self.rm_type, options=self.options)[0], requests)

    def _without_failed(
        self, samples: list[Sample], requests: list[RewardRequest], error: RewardServiceError
    ) -> list[Reward | BaseException]:
        """Leave out the sample that a service failed on and ask again for the others, a few times.

        A service that is down fails on every one, after its retries; the rest of the batch fails with it then.
        """
        results: list[Reward | BaseException | None] = [None] * len(samples)
        left = list(range(len(samples)))
        for _ in range(_MAX_SERVICE_ERRORS):
            named = _NAMED_SAMPLE.search(str(error))
            failed = [i for i in left if named and samples[i].index == int(named.group(1))]
            for i in failed:
                results[i] = error
                left.remove(i)
            if not failed or not left:
                break
            try:
                scores = score([requests[i] for i in left], self.rm_type, options=self.options)
            except RewardServiceError as another:
                error = another
                continue
            for i, value in zip(left, scores, strict=True):
                results[i] = value
            left = []
            break
        return [error if result is None else result for result in results]


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

    def check(row: PromptRow) -> str | None:
        name = row.metadata.get("rm_type") or rm_type
        if name is None:
            return "no reward: give --rm-type, or metadata.rm_type in the row"
        try:
            needs = needs_label(name)
        except UnknownRewardError as error:
            return f"metadata.rm_type: {error}" if row.metadata.get("rm_type") else str(error)
        if needs and (row.label is None or row.label == ""):
            return f"no label, which the reward {name} needs (--label-key)"
        return None

    return check
