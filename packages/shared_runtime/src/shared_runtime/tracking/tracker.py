"""The tracker: hands a step's metrics to every sink and decides what a failure of one means."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shared_runtime.tracking.sink import LoggedImage, Sink, TrackingError

logger = logging.getLogger(__name__)


class Tracker:
    """Logs to several sinks.

    * A NaN or infinite metric is logged as null; `tracking/non_finite` counts those of the row, and the first time a
      key is hit a warning names it.
    * A required sink (the JSONL files) that fails raises :class:`TrackingError`: a run without a record is no result.
    * An optional sink (console, W&B, TensorBoard, plots) that fails warns once. Every failure is counted in
      `tracking/<sink>_errors`, which stands in the rows of metrics.jsonl from then on.

    Args:
        sinks: In the order they are called; required ones are called first whatever their place.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sorted(sinks, key=lambda sink: not sink.required)
        self.errors: Counter[str] = Counter()
        self._warned_keys: set[str] = set()
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step; may be called several times for one step, each call is a row.

        Args:
            step: The rollout id, from 0; -1 is before training.
            metrics: Name to number; zero-dimensional arrays and tensors count as numbers.

        Raises:
            TypeError: If a value is no number.
            TrackingError: If a required sink fails.
        """
        row = self._finite(step, metrics)
        row.update({f"tracking/{name}_errors": count for name, count in self.errors.items()})
        self._each(lambda sink: sink.log(step, row))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log sampled rows of a step."""
        self._each(lambda sink: sink.log_samples(step, rows))

    def log_images(self, step: int, key: str, images: Sequence[LoggedImage]) -> None:
        """Log pictures of a step under a metric-like key (`rollout_media/sample_images`)."""
        self._each(lambda sink: sink.log_images(step, key, images))

    def phase(self, name: str | None) -> None:
        """Tell what the run is doing now; fits `Timers(on_change=tracker.phase)`."""
        self._each(lambda sink: sink.phase(name))

    def truncate_after(self, step: int) -> None:
        """On resume: forget every row later than `step` (-1 forgets all), so that none stands twice."""
        self._each(lambda sink: sink.truncate_after(step))

    def close(self) -> None:
        """Close every sink, also when one of them fails; then raise the first required sink's failure."""
        if self._closed:
            return
        self._closed = True
        failure: TrackingError | None = None
        for sink in self.sinks:
            try:
                self._call(sink, sink.close)
            except TrackingError as error:
                failure = failure or error
        for name, count in self.errors.items():
            logger.warning("%s failed %d times in this run; metrics.jsonl is complete", name, count)
        if failure:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            self._call(sink, lambda sink=sink: action(sink))  # type: ignore[misc]

    def _call(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if sink.required:
                if isinstance(error, TrackingError):
                    raise
                raise TrackingError(f"{sink.name}: {error}") from error
            self.errors[sink.name] += 1
            if self.errors[sink.name] == 1:
                logger.warning(
                    "logging to %s failed and goes on without it (counted in tracking/%s_errors): %s: %s",
                    sink.name, sink.name, type(error).__name__, error,
                )  # fmt: skip

    def _finite(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        row: dict[str, float | None] = {}
        bad = []
        for key, value in metrics.items():
            number = _number(key, value)
            if math.isfinite(number):
                row[key] = number
            else:
                row[key] = None
                bad.append(key)
        if bad:
            row["tracking/non_finite"] = len(bad)
            new = [key for key in bad if key not in self._warned_keys]
            self._warned_keys.update(new)
            if new:
                logger.warning("step %d: not finite, logged as null: %s", step, ", ".join(new))
        return row


def _number(key: str, value: Any) -> float:
    """`value` as a float, or as an int where it is one."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"metric {key!r} is a {type(value).__name__}, not a number: {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {key!r} is not one number: {error}") from error
