"""The training loop: sample -> score -> train -> publish, the same for language and diffusion models.

A domain brings what differs (how to roll out, what a training row is); trainers and engines are worker groups that
may live in Ray actors or in this process. Nothing here knows which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared_runtime.checkpoint.saver import Saver
from shared_runtime.domain import Domain
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.rollout.event_loop import EventLoop
from shared_runtime.tracking.timers import WORK, Timers
from shared_runtime.tracking.tracker import Tracker
from shared_runtime.weight_sync.session import publish


@dataclass(frozen=True)
class LoopSettings:
    """When things happen.

    Attributes:
        num_rollout: Rollouts in the whole run.
        eval_interval: Rollouts between evaluations; `None` evaluates before the first and after the last.
        eval_key: Metric that `eval_target` looks at; `None` without evaluation sets.
        eval_target: Stop when it is reached.
        offload_train: The trainer sleeps while the engines generate.
        offload_rollout: The engines sleep while the trainer trains.
        update_weights_interval: Rollouts between weight updates; the last one is always followed by one.
        buffer_size: Largest bucket of a weight update, in bytes.
        check_equal: Compare a checksum of every tensor after each update.
    """

    num_rollout: int
    eval_interval: int | None = None
    eval_key: str | None = None
    eval_target: float | None = None
    offload_train: bool = False
    offload_rollout: bool = False
    update_weights_interval: int = 1
    buffer_size: int = 512 * 1024 * 1024
    check_equal: bool = False


@dataclass
class LoopResult:
    """How a run went: rollouts done, evaluation before and after, and whether the target was reached."""

    rollouts: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    reached_target: bool = False


class TrainLoop:
    """One run. `trainers` is absent in rollout-only runs, `engines` in train-only runs."""

    def __init__(
        self,
        domain: Domain,
        trainers: WorkerGroup | None,
        engines: WorkerGroup | None,
        tracker: Tracker,
        saver: Saver,
        settings: LoopSettings,
    ) -> None:
        self.domain, self.trainers, self.engines = domain, trainers, engines
        self.tracker, self.saver, self.settings = tracker, saver, settings
        self.timers = Timers(on_change=tracker.phase)
        self.event_loop = EventLoop()
        self.result = LoopResult()

    def run(self) -> LoopResult:
        """Resume from the latest checkpoint, if any, and go on to the end."""
        try:
            self._resume()
            self._hand_device_to_engines(version=self.result.rollouts, publishes=True)
            if self.result.rollouts == 0:
                self.tracker.log(-1, self._evaluate(-1))
            while self.result.rollouts < self.settings.num_rollout and not self.result.reached_target:
                self._step(rollout_id=self.result.rollouts)
            return self.result
        finally:
            self.event_loop.close()

    def _step(self, rollout_id: int) -> None:
        self.timers.start_step()
        rollout = self.event_loop.run(self.domain.rollout(rollout_id))
        metrics = dict(rollout.metrics)
        if self.trainers is not None:
            with self.timers("actor_train"):
                plans = self.domain.plan(rollout_id, rollout)
                self._hand_device_to_trainers()
                metrics |= self.trainers.call_each("train", [(rollout_id, steps) for steps in plans])[0]
            self._hand_device_to_engines(version=rollout_id + 1)
        self.result.rollouts = rollout_id + 1
        if self._eval_due():
            metrics |= self._evaluate(rollout_id)
        self.tracker.log_samples(rollout_id, self.domain.sample_rows(rollout))
        if images := self.domain.sample_images(rollout_id, rollout):
            self.tracker.log_images(rollout_id, "rollout_media/sample_images", images)
        self.tracker.log(rollout_id, with_overhead(self.timers.pop() | metrics))
        last = self.result.rollouts == self.settings.num_rollout or self.result.reached_target
        if self.trainers is not None and self.saver.due(self.result.rollouts, last=last):
            self.saver.save(self.result.rollouts, self.trainers, self.domain, vars(self.result))

    def _hand_device_to_engines(self, version: int, *, publishes: bool | None = None) -> None:
        """Let the engines go on, with the trainers' weights if an update is due."""
        if publishes is None:
            publishes = version % self.settings.update_weights_interval == 0 or version == self.settings.num_rollout
        if self.trainers is None or self.engines is None:
            return
        with self.timers("update_weights"):
            if self.settings.offload_rollout:
                self.engines.call("wake_up")
            if publishes:
                publish(
                    self.trainers,
                    self.engines,
                    version,
                    buffer_size=self.settings.buffer_size,
                    check_equal=self.settings.check_equal,
                )
            if self.settings.offload_train:
                self.trainers.call("sleep")

    def _hand_device_to_trainers(self) -> None:
        if self.settings.offload_rollout and self.engines is not None:
            self.engines.call("sleep")
        if self.settings.offload_train and self.trainers is not None:
            self.trainers.call("wake_up")

    def _eval_due(self) -> bool:
        done, interval = self.result.rollouts, self.settings.eval_interval
        return done == self.settings.num_rollout or (interval is not None and done % interval == 0)

    def _evaluate(self, rollout_id: int) -> dict[str, float]:
        key, target = self.settings.eval_key, self.settings.eval_target
        if self.engines is None or key is None:
            return {}
        with self.timers("eval"):
            scores = self.event_loop.run(self.domain.evaluate(rollout_id))
        if rollout_id < 0:
            self.result.before = scores
        self.result.after = scores
        self.result.reached_target = target is not None and scores[key] >= target
        return scores

    def _resume(self) -> None:
        state = self.saver.resume(self.trainers, self.domain)
        if state is not None:
            self.result = LoopResult(**state)
        # Rows behind the checkpoint are computed again; without one nothing counts, the evaluation at -1 included.
        self.tracker.truncate_after(self.result.rollouts - 1 if state is not None else -2)


def with_overhead(metrics: dict[str, float]) -> dict[str, float]:
    """Add `perf/overhead`: the share of the step that is not generating, scoring, training, publishing, evaluating."""
    work = sum(metrics.get(f"perf/{name}_time", 0.0) for name in WORK)
    return metrics | {"perf/overhead": max(0.0, 1.0 - work / metrics["perf/step_time"])}
