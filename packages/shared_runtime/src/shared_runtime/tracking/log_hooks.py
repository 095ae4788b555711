"""Custom log functions: `--custom-rollout-log-function-path`, `--custom-eval-rollout-log-function-path`.

    def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool: ...
    def log_eval_rollout_data(rollout_id, args, data, extra_metrics) -> bool: ...

Returning `True` leaves the default logging of that call out; `False` or nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Self

from shared_runtime.hooks import HookSpec, load_function

LogFunction = Callable[..., bool | None]

ROLLOUT_LOG = HookSpec(("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"))
EVAL_LOG = HookSpec(("rollout_id", "args", "data", "extra_metrics"))


class LogHooks:
    """The two custom log functions of a run; either may be absent.

    Args:
        rollout: Called after each rollout.
        evaluation: Called after each evaluation.
        args: The run's configuration, passed on as `args`.
    """

    def __init__(
        self, rollout: LogFunction | None = None, evaluation: LogFunction | None = None, args: Any = None
    ) -> None:
        self._rollout = rollout
        self._evaluation = evaluation
        self._args = args

    @classmethod
    def load(cls, rollout_path: str | None, evaluation_path: str | None, args: Any = None) -> Self:
        """From the dotted paths of the two flags.

        Raises:
            HookError: If a path doesn't import or its function can't be called as above; names the flag.
        """
        rollout = evaluation = None
        if rollout_path:
            rollout = load_function(rollout_path, "--custom-rollout-log-function-path", ROLLOUT_LOG)
        if evaluation_path:
            evaluation = load_function(evaluation_path, "--custom-eval-rollout-log-function-path", EVAL_LOG)
        return cls(rollout, evaluation, args)

    def rollout(
        self,
        rollout_id: int,
        samples: Sequence[Any],
        extra_metrics: MutableMapping[str, float],
        rollout_time: float,
    ) -> bool:
        """Whether the custom function has logged this rollout, so that the default is left out.

        What the function adds to `extra_metrics` is the caller's to log.
        """
        if self._rollout is None:
            return False
        return _verdict(self._rollout, self._rollout(rollout_id, self._args, samples, extra_metrics, rollout_time))

    def evaluation(self, rollout_id: int, data: Mapping[str, Any], extra_metrics: MutableMapping[str, float]) -> bool:
        """The same for an evaluation; `data` is the samples of each set."""
        if self._evaluation is None:
            return False
        return _verdict(self._evaluation, self._evaluation(rollout_id, self._args, data, extra_metrics))


def _verdict(function: LogFunction, result: object) -> bool:
    if result is None or isinstance(result, bool):
        return bool(result)
    raise TypeError(
        f"log function {function.__module__}.{function.__qualname__} returned a {type(result).__name__}; "
        "return True to leave the default logging out, False to keep it"
    )
