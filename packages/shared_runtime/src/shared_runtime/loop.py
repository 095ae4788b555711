"""The training loop: sample -> score -> train -> publish, the same for language and diffusion models.

A domain brings what differs (how to roll out, what a training row is); trainers and engines are worker groups that
may live in Ray actors or in this process. Nothing here knows which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_runtime.async_runner import AsyncRunner
from shared_runtime.checkpoint.saver import Saver
from shared_runtime.domain import Domain
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.tracking.timers import Timers
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
        buffer_size: Largest bucket of a weight update, in bytes.
        check_equal: Compare a checksum of every tensor after each update.
    """

    num_rollout: int
    eval_interval: int | None = None
    eval_key: str | None = None
    eval_target: float | None = None
    offload_train: bool = False
    offload_rollout: bool = False
    buffer_size: int = 512 * 1024 * 1024
    check_equal: bool = False


@dataclass
class LoopResult:
    """How a run went: evaluation before and after, rollouts done, and whether the target was reached."""

    rollouts: int
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
        self.async_runner = AsyncRunner()
        self.result = LoopResult(rollouts=0)

    def run(self) -> LoopResult:
        """Resume from the latest checkpoint, if any, and go on to the end."""
        try:
            start = self._resume()
            self._publish(start)
            if start == 0:
                self.tracker.log(0, self._evaluate(0))
            for rollout_id in range(start, self.settings.num_rollout):
                if self.result.reached_target:
                    break
                self._step(rollout_id)
            return self.result
        finally:
            self.async_runner.close()

    def _step(self, rollout_id: int) -> None:
        timers = Timers()
        done = rollout_id + 1
        rollout = self.async_runner.run(self.domain.rollout(rollout_id))
        metrics = dict(rollout.metrics)
        if self.trainers is not None:
            self._hand_over(self.engines, self.trainers)
            plans = self.domain.plan(rollout_id, rollout)
            with timers("actor_train"):
                metrics |= self.trainers.call_each("train", [(rollout_id, steps) for steps in plans])[0]
            with timers("update_weights"):
                self._publish(done)
        metrics |= timers.metrics(metrics)
        evaluation = self._evaluate(done) if self._eval_due(done) else {}
        self.tracker.log(done, metrics | evaluation)
        self.tracker.log_samples(done, self.domain.sample_rows(rollout))
        self.result.rollouts = done
        last = done == self.settings.num_rollout or self.result.reached_target
        if self.trainers is not None and self.saver.due(done, last=last):
            self.saver.save(done, self.trainers, self._driver_state(done))

    def _publish(self, version: int) -> None:
        """Bring the engines to the trainer's weights and hand them the device."""
        if self.trainers is None or self.engines is None:
            return
        if self.settings.offload_rollout and version > 0:
            self.engines.call("wake_up")
        publish(
            self.trainers,
            self.engines,
            version,
            buffer_size=self.settings.buffer_size,
            check_equal=self.settings.check_equal,
        )
        if self.settings.offload_train:
            self.trainers.call("sleep")

    def _hand_over(self, engines: WorkerGroup | None, trainers: WorkerGroup) -> None:
        """Hand the device from the engines to the trainer."""
        if self.settings.offload_rollout and engines is not None:
            engines.call("sleep")
        if self.settings.offload_train:
            trainers.call("wake_up")

    def _eval_due(self, done: int) -> bool:
        interval = self.settings.eval_interval
        return done == self.settings.num_rollout or (interval is not None and done % interval == 0)

    def _evaluate(self, done: int) -> dict[str, float]:
        key = self.settings.eval_key
        if self.engines is None or key is None:
            return {}
        began = time.perf_counter()
        scores = self.async_runner.run(self.domain.evaluate(done))
        if done == 0:
            self.result.before = scores
        self.result.after = scores
        target = self.settings.eval_target
        self.result.reached_target = target is not None and scores[key] >= target
        return scores | {"perf/eval_time": time.perf_counter() - began}

    def _resume(self) -> int:
        state = self.saver.resume(self.trainers)
        if state is None:
            return 0
        self.domain.load_state_dict(state["domain"])
        self.result = LoopResult(**state["result"])
        self.tracker.truncate_after(state["rollouts"])
        return state["rollouts"]

    def _driver_state(self, done: int) -> dict[str, Any]:
        return {"rollouts": done, "domain": self.domain.state_dict(), "result": vars(self.result)}


def export_hf(trainers: WorkerGroup, directory: Path) -> None:
    """Write the trained weights as a Hugging Face directory; a crash leaves no half of one behind."""
    staging = directory.with_name(directory.name + ".tmp")
    trainers.call("save_hf", staging)
    staging.rename(directory)
