"""A pool of Ray workers for one reward, standalone or on the bundles of a placement group (extra: `ray`)."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rewards.registry import get_spec
from rewards.request import MissingExtraError, RewardError, RewardRequest, Score
from rewards.slots import SlotLedger

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"a reward pool needs {error.name}: install the extra with `uv pip install 'tandem-rewards[ray]'`."
    ) from error

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["RewardPool", "SlotLedger"]

logger = logging.getLogger(__name__)


@dataclass
class _Worker:
    actor: Any
    bundle: int | None
    depth: int = 0


class RewardPool:
    """Scores batches on several workers in turn. Safe to call from several threads.

    A worker that dies is replaced, and its batch is tried once more; a batch that kills two workers is an error that
    names its samples. Whatever a reward raises comes out as it is.

    Args:
        rm_type: The reward, or the default of requests that name their own.
        options: Options of rewards by name, as `score` takes them.
        num_workers: Workers; each builds its scorer once.
        num_cpus_per_worker: CPU share of a worker.
        num_gpus_per_worker: GPU share of a worker.
        resources_per_worker: Shares of custom resources.
        batch_size: Requests sent to a worker at once.
        placement_group: Seat the workers on its bundles, one each, in place of Ray's own choice.
        ledger: The bundles that are free, if several pools share the group; by default all of them.
    """

    def __init__(
        self,
        rm_type: str,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1.0,
        num_gpus_per_worker: float = 0.0,
        resources_per_worker: Mapping[str, float] | None = None,
        batch_size: int = 8,
        placement_group: PlacementGroup | None = None,
        ledger: SlotLedger | None = None,
    ) -> None:
        get_spec(rm_type)
        if num_workers < 1 or batch_size < 1:
            raise ValueError(f"the {rm_type} pool needs at least one worker and a batch size of at least 1")
        self.rm_type, self.batch_size = rm_type, batch_size
        self._options = {name: dict(entry) for name, entry in (options or {}).items()}
        self._shares: dict[str, Any] = {
            "num_cpus": num_cpus_per_worker,
            "num_gpus": num_gpus_per_worker,
            "resources": dict(resources_per_worker or {}) or None,
        }
        self._group, self._ledger = placement_group, None
        bundles: list[int | None] = [None] * num_workers
        if placement_group is not None:
            self._ledger = ledger or SlotLedger(placement_group.bundle_count)
            bundles = [*self._ledger.take(num_workers, rm_type)]
        self._lock = threading.Lock()
        self._next, self._restarts, self._samples, self._batches, self._deepest = 0, 0, 0, 0, 0
        self._workers = [_Worker(self._start(bundle), bundle) for bundle in bundles]

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order.

        Raises:
            RewardError: What the reward raised, or a batch that lost two workers.
        """
        results: list[Score] = []
        outcomes = self._run(requests, "score")
        for _, outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            results += outcome
        return results

    def score_each(self, requests: Sequence[RewardRequest]) -> list[Score | BaseException]:
        """As :meth:`score`, with what was raised in the place of each request that can't be scored."""
        results: list[Score | BaseException] = []
        for batch, outcome in self._run(requests, "score_each"):
            results += [outcome] * len(batch) if isinstance(outcome, Exception) else outcome
        return results

    async def score_async(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """`score` without holding up the event loop."""
        return await asyncio.to_thread(self.score, requests)

    def metrics(self) -> dict[str, float]:
        """Queue depth (batches sent and not yet back) in all, at most for one worker; restarts; work done so far."""
        prefix = f"reward_pool/{self.rm_type}"
        with self._lock:
            depths = [worker.depth for worker in self._workers]
            return {
                f"{prefix}/queue_depth": float(sum(depths)),
                f"{prefix}/queue_depth_max": float(max(depths)),
                f"{prefix}/workers": float(len(depths)),
                f"{prefix}/worker_restarts": float(self._restarts),
                f"{prefix}/batches": float(self._batches),
                f"{prefix}/samples": float(self._samples),
            }

    def pop_metrics(self) -> dict[str, float]:
        """The deepest backlog since the last call, and the workers replaced so far.

        A backlog is the number of batches that a worker still had when another was handed to it; 0 means that nothing
        waited.
        """
        with self._lock:
            deepest, self._deepest = self._deepest, 0
            return {
                f"perf/reward_max_queue_depth_{self.rm_type}": float(deepest),
                f"perf/reward_worker_restarts_{self.rm_type}": float(self._restarts),
            }

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker has its place.

        Raises:
            TimeoutError: The cluster has no room for all of them.
        """
        pings = [actor.process_id.remote() for actor in self.actors()]
        ready, _ = ray.wait(pings, num_returns=len(pings), timeout=timeout_s)
        if len(ready) < len(pings):
            shares = f"{self._shares['num_cpus']:g} CPUs and {self._shares['num_gpus']:g} GPUs"
            raise TimeoutError(
                f"{len(ready)} of {len(pings)} {self.rm_type} reward workers started within {timeout_s:g} s: each "
                f"needs {shares} that nothing else holds"
            )

    def actors(self) -> list[Any]:
        """Handles of the workers, for health checks."""
        return [worker.actor for worker in self._workers]

    def shutdown(self) -> None:
        """End the workers and free their bundles."""
        with self._lock:
            for worker in self._workers:
                ray.kill(worker.actor)
            if self._ledger is not None:
                self._ledger.give_back([worker.bundle for worker in self._workers if worker.bundle is not None])
                self._ledger = None

    def _start(self, bundle: int | None) -> Any:
        strategy = None
        if self._group is not None and bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = _RewardWorker.options(scheduling_strategy=strategy, **self._shares)  # type: ignore[attr-defined]
        return actor.remote(self.rm_type, self._options)

    def _run(self, requests: Sequence[RewardRequest], method: str) -> list[tuple[list[RewardRequest], Any]]:
        """Have a worker's method work on the requests: (batch, its results or what was raised), in order."""
        named = [
            replace(request, sample_id=index) if request.sample_id is None else request
            for index, request in enumerate(requests)
        ]
        batches = [named[start : start + self.batch_size] for start in range(0, len(named), self.batch_size)]
        submitted = [self._submit(batch, method) for batch in batches]
        outcomes: list[tuple[list[RewardRequest], Any]] = []
        for batch, sent in zip(batches, submitted, strict=True):
            try:
                outcomes.append((batch, self._finish(batch, method, *sent)))
            except Exception as error:  # the others still have to be taken off their queues
                outcomes.append((batch, error))
        return outcomes

    def _submit(self, batch: list[RewardRequest], method: str) -> tuple[_Worker, Any, Any]:
        """Send a batch to the worker whose turn it is: (worker, its actor now, the reference of the scores)."""
        with self._lock:
            worker = self._workers[self._next % len(self._workers)]
            self._next += 1
            self._deepest = max(self._deepest, worker.depth)
            worker.depth += 1
            return worker, worker.actor, getattr(worker.actor, method).remote(batch)

    def _finish(
        self, batch: list[RewardRequest], method: str, worker: _Worker, actor: Any, reference: Any
    ) -> list[Any]:
        """Wait for a batch; where its worker died, replace it and try the batch once more."""
        try:
            try:
                scores = ray.get(reference)
            except RayActorError as error:
                logger.warning("a %s reward worker died and is replaced: %s", self.rm_type, error)
                actor = self._replace(worker, actor)
                scores = ray.get(getattr(actor, method).remote(batch))
        except RayActorError as error:
            self._replace(worker, actor)
            names = ", ".join(str(request.sample_id) for request in batch)
            raise RewardError(f"the {self.rm_type} reward lost two workers to samples {names}: {error}") from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        finally:
            with self._lock:
                worker.depth -= 1
        with self._lock:
            self._batches += 1
            self._samples += len(batch)
        return scores

    def _replace(self, worker: _Worker, dead: Any) -> Any:
        """A living actor for the worker; another batch may have replaced it already."""
        with self._lock:
            if worker.actor is dead:
                ray.kill(dead)
                worker.actor = self._start(worker.bundle)
                self._restarts += 1
            return worker.actor


@ray.remote(max_restarts=0)
class _RewardWorker:
    """One process that scores batches."""

    def __init__(self, rm_type: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._rm_type, self._options = rm_type, options
        if not ray.get_gpu_ids():  # Ray may leave a worker without a share the GPUs that others have reserved
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def score(self, requests: list[RewardRequest]) -> list[Score]:
        """One score a request."""
        from rewards import score

        return score(requests, self._rm_type, options=self._options)

    def score_each(self, requests: list[RewardRequest]) -> list[Score | BaseException]:
        """One score a request, or what was raised for it."""
        from rewards.each import score_each

        results = score_each(requests, self._rm_type, options=self._options)
        return [_portable(result) if isinstance(result, BaseException) else result for result in results]

    def process_id(self) -> int:
        """The worker's process."""
        return os.getpid()


def _portable(error: BaseException) -> BaseException:
    """The error itself, or what it says where it can't travel between processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RewardError(f"{type(error).__name__}: {error}")
    return error
