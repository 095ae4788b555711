"""The reward of a sample: a batch function of the domain, or the user's function in any of its forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from shared_runtime.hooks import HookSpec, is_async
from shared_runtime.rollout.threads import ThreadBatcher, call_each
from shared_runtime.sample import BaseSample

SAMPLE_REWARD_HOOK = HookSpec(("args", "sample"), is_async=None)
GROUP_REWARD_HOOK = HookSpec(("args", "samples"), is_async=None)

POOL_BATCHES = 64
"""Batches that wait for a pool of workers at once; each of them holds a thread."""

S = TypeVar("S", bound=BaseSample)
Reward = float | dict[str, Any]
Unit = Literal["sample", "microgroup", "group"]


class SampleScorer(Generic[S]):
    """Scores samples as they come, or with `group_rm` whole groups.

    Everything blocking runs in a thread, one hop for all samples that are ready: built-in rewards on up to
    `max_workers` batches at once, a user's ordinary function on one at a time, so it need not be thread-safe. A user's
    `async def` runs on the event loop. Exactly one of the three attributes is set.

    Attributes:
        score: The reward of one sample.
        score_microgroup: The rewards of what one engine request generated.
        score_group: The rewards of a group.
    """

    def __init__(
        self,
        *,
        built_in: Callable[[list[S]], list[Reward | BaseException]],
        custom: Callable[..., Any] | None = None,
        unit: Unit = "sample",
        args: Any = None,
        max_workers: int = 2,
        pop_metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Set up.

        Args:
            built_in: Scores a batch; a sample that can't be scored gets what was raised.
            custom: The user's function instead: `(args, sample)` for the unit `sample`, else `(args, samples)`.
            unit: What `custom` is called with.
            args: Passed to `custom`.
            max_workers: Batches that `built_in` works on at once.
            pop_metrics: Numbers about the scoring since the last call.
        """
        self.pop_metrics = pop_metrics
        self.score: Callable[[S], Any] | None = None
        self.score_microgroup: Callable[[list[S]], Any] | None = None
        self.score_group: Callable[[list[S]], Any] | None = None
        self._batcher: ThreadBatcher[Any, Any] | None = None
        if custom is None:
            self._batcher = ThreadBatcher(built_in, max_workers)
            self.score = self._batcher.submit
        else:
            call = self._custom(custom, args)
            if unit == "sample":
                self.score = call
            elif unit == "microgroup":
                self.score_microgroup = call
            else:
                self.score_group = call

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
