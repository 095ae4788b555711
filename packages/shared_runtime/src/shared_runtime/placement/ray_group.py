"""A group of workers in Ray actors.

One call costs one actor call. Values go from worker to worker by handle, through shared memory: numpy arrays arrive
without a copy and therefore read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import psutil

from shared_runtime.placement.cluster import Cluster
from shared_runtime.placement.devices import actor_options, visible_devices
from shared_runtime.placement.failures import (
    Failure,
    Kind,
    WorkerDied,
    classify,
    how_it_died,
    origin,
    pid_in,
    root_cause,
)
from shared_runtime.placement.processes import end_processes, last_lines, oom_kills
from shared_runtime.placement.ray_host import HostSettings, WorkerHost, WorkerProcess

# How often a long wait looks whether all workers of the run still live.
_POLL_S = 0.5
# Ray begins every log with lines like these.
_RAY_LABELS = (":job_id:", ":actor_name:", ":task_name:")
# How long a lost connection waits for the exception that caused it.
_GRACE_S = 3.0


class RayWorkerGroup:
    """Workers of one class, each in a Ray actor at its place in the layout. Implements `WorkerGroup`.

    The constructor returns at once: several groups start side by side. The first `wait` waits for all of them.

    Args:
        worker_class: Its instances are the workers. It is imported in the workers, where it needs no Ray.
        per_worker_kwargs: Constructor arguments, one dict a worker, as many as the layout has workers for the role.
            A value may be an object reference.
        cluster: Where they run.
        role: Their role in the cluster's layout.
        collective: The workers form one `torch.distributed` world: they find each other as under `torchrun`
            (`init_process_group` needs no arguments but the backend), and an exception in one of them ends the group,
            since the others would wait for it forever. Otherwise an exception leaves the group usable.
        num_threads: Compute threads of each worker; by default the machine's cores shared by the group, or
            `OMP_NUM_THREADS` where the user has set it.
        env: Further environment variables of the workers.
    """

    def __init__(
        self,
        worker_class: type,
        per_worker_kwargs: Sequence[Mapping[str, Any]],
        *,
        cluster: Cluster,
        role: str,
        collective: bool = False,
        num_threads: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        import ray
        from ray import cloudpickle

        slots = cluster.slots(role)
        if len(per_worker_kwargs) != len(slots):
            raise ValueError(f"role {role!r} has {len(slots)} workers, got arguments for {len(per_worker_kwargs)}")
        self.role, self.size, self._cluster, self._collective = role, len(slots), cluster, collective
        self._failure: Exception | None = None
        self._closed = False
        self._oom_kills = oom_kills()
        threads = os.environ.get("OMP_NUM_THREADS") or str(num_threads or cluster.num_threads(role))
        nodes = [slot.node for slot in slots]
        one_machine = cluster.local or len(set(nodes)) == 1
        host_class = ray.remote(WorkerHost)
        devices = visible_devices(cluster, slots)
        self._actors: list[Any] = []
        for rank, slot in enumerate(slots):
            worker_env = {"OMP_NUM_THREADS": threads} | devices[rank] | dict(env or {})
            settings = HostSettings(role, rank, self.size, nodes.count(slot.node), worker_env)
            self._actors.append(host_class.options(**actor_options(cluster, slot)).remote(settings))
        rendezvous = self._actors[0].open_store.remote(one_machine) if collective else None
        pickled = cloudpickle.dumps(worker_class)
        self._built = False
        self._processes: list[Any] = [
            actor.build.remote(pickled, rendezvous, list(kwargs), *kwargs.values())
            for actor, kwargs in zip(self._actors, per_worker_kwargs, strict=True)
        ]
        self._pings = [actor.ping.remote() for actor in self._actors]
        cluster.groups.append(self)

    def start(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        """Call `method(*args)` on every worker (or on those named); return one handle each, without waiting."""
        self._check_usable()
        actors = self._actors if workers is None else [self._actors[rank] for rank in workers]
        return [actor.call.remote(method, *args) for actor in actors]

    def start_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on each worker with its own arguments; return one handle each, without waiting."""
        self._check_usable()
        if len(per_worker) != self.size:
            raise ValueError(f"{self.role!r} has {self.size} workers, got arguments for {len(per_worker)}")
        return [actor.call.remote(method, *args) for actor, args in zip(self._actors, per_worker, strict=True)]

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Wait for handles; the first failure of any worker of the run is raised within seconds.

        Raises:
            Exception: what the worker raised, as its own type, with the worker's traceback as its text.
            WorkerDied: if a worker's process is gone and no exception explains it.
        """
        import ray
        from ray.exceptions import GetTimeoutError

        if not self._built:
            self._wait_built()
        handles = list(handles)
        while True:
            self._check_usable()
            try:
                return ray.get(handles, timeout=_POLL_S)
            except GetTimeoutError:
                failures = self._failures_among(handles) + self._dead_workers()
            except Exception as error:
                failures = [self._failure_of(error)]
            if failures:
                self._raise_root_cause(failures, handles)

    async def wait_async(self, handle: Any) -> Any:
        """Wait for one handle without blocking the event loop."""
        if not self._built:
            await asyncio.to_thread(self._wait_built)
        future = asyncio.ensure_future(_value(handle))
        self._cluster.waited_on.append(handle)
        try:
            while True:
                self._check_usable()
                done, _ = await asyncio.wait([future], timeout=_POLL_S)
                failures = self._dead_workers() if not done else []
                if done and future.exception() is None:
                    return future.result()
                if done and isinstance(error := future.exception(), Exception):
                    failures = [self._failure_of(error)]
                if failures:
                    await asyncio.to_thread(self._raise_root_cause, failures, [handle])
        finally:
            self._cluster.waited_on.remove(handle)
            future.cancel()

    def call(self, method: str, *args: Any) -> list[Any]:
        """`wait(start(method, *args))`."""
        return self.wait(self.start(method, *args))

    def call_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`wait(start_each(method, per_worker))`."""
        return self.wait(self.start_each(method, per_worker))

    def shutdown(self, patience_s: float = 5.0) -> None:
        """Let the workers tidy up (their `shutdown` method), then end them; no process stays behind."""
        import ray

        if self._failure is None and not self._closed:
            with contextlib.suppress(Exception):
                ray.get([actor.close.remote() for actor in self._actors], timeout=patience_s)
        self.kill()

    def kill(self) -> None:
        """End the workers and their children at once."""
        import ray

        if self._closed:
            return
        self._closed = True
        children = self._local_processes()
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        end_processes(children, patience_s=0.5)

    def pids(self) -> list[int]:
        """Process ids of the workers, in rank order."""
        return [process.pid for process in self.wait(self._processes)]

    def _wait_built(self) -> None:
        if self._built:
            return
        self._built = True
        try:
            self.wait(self._processes)
        except BaseException as error:
            # A group of which a part is missing is of no use to anybody.
            self._failure = self._failure or (error if isinstance(error, Exception) else None)
            self.kill()
            raise

    def _process(self, rank: int) -> WorkerProcess | None:
        """The worker's process, if it has lived long enough to say so."""
        import ray

        with contextlib.suppress(Exception):
            return ray.get(self._processes[rank], timeout=0)
        return None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError(f"the {self.role!r} workers have been shut down")

    def _failures_among(self, handles: Sequence[Any]) -> list[Failure]:
        """Failures among the handles that are done."""
        import ray

        failures = []
        unique = list(dict.fromkeys(handles))
        done = ray.wait(unique, num_returns=len(unique), timeout=0)[0] if unique else []
        for handle in done:
            try:
                ray.get(handle)
            except Exception as error:
                failures.append(self._failure_of(error))
        return failures

    def _dead_workers(self) -> list[Failure]:
        """Workers of any group of the run whose process is gone."""
        return [failure for group in self._cluster.groups if not group._closed for failure in group._look()]

    def _look(self) -> list[Failure]:
        """Dead workers of this group. A ping waits behind a running method, and fails at once with the process."""
        failures = []
        for rank, ping in enumerate(self._pings):
            found = self._failures_among([ping])
            failures += [Failure(Kind.DIED, failure.error, self, rank) for failure in found]
            if not found and _is_done(ping):
                self._pings[rank] = self._actors[rank].ping.remote()
        return failures

    def _failure_of(self, error: Exception) -> Failure:
        """Say which worker of the run an error comes from."""
        place = origin(str(error))
        actor_id = getattr(error, "actor_id", None)
        # This group first: one that has ended may have had the same role.
        for group in [self, *(other for other in self._cluster.groups if not other._closed)]:
            for rank, actor in enumerate(group._actors):
                if place == (group.role, rank) or (place is None and actor_id == actor._actor_id.hex()):
                    return Failure(classify(error), error, group, rank)
        return Failure(classify(error), error, self, 0)

    def _raise_root_cause(self, failures: list[Failure], handles: Sequence[Any]) -> NoReturn:
        """Raise the failure that explains the others, after a moment for it to arrive; end what can't go on."""
        deadline = time.monotonic() + _GRACE_S
        waited_on = list(dict.fromkeys([*handles, *self._cluster.waited_on]))
        while root_cause(failures).kind is not Kind.RAISED and time.monotonic() < deadline:
            time.sleep(0.1)
            failures = failures + self._failures_among(waited_on) + self._dead_workers()
            if root_cause(failures).kind is Kind.DIED:
                # An exception that explains a death was sent before it.
                deadline = min(deadline, time.monotonic() + 1.0)
        cause = root_cause(failures)
        error = cause.group._died(cause) if cause.kind is Kind.DIED else _with_place(cause)
        for affected in dict.fromkeys([self, cause.group]):
            if cause.kind is not Kind.RAISED or cause.group._collective:
                affected._failure = affected._failure or error
                affected.kill()
        raise error

    def _died(self, failure: Failure) -> WorkerDied:
        process = self._process(failure.rank)
        # A process that dies right after its start has had no time to tell, but Ray knows it.
        pid = process.pid if process else pid_in(str(failure.error))
        lines: list[str] = []
        if pid is not None and self._cluster.session_dir is not None:
            for log in (self._cluster.session_dir / "logs").glob(f"worker-*-{pid}.err"):
                lines = [line for line in last_lines(log) if not line.startswith(_RAY_LABELS)]
        how = how_it_died(failure.error, lines, oom_kills() - self._oom_kills)
        return WorkerDied(self.role, failure.rank, pid, how, lines)

    def _local_processes(self) -> list[psutil.Process]:
        """The workers' processes on this machine, with their children."""
        found: list[psutil.Process] = []
        for rank in range(self.size) if self._cluster.local else []:
            if (process := self._process(rank)) is not None:
                with contextlib.suppress(psutil.Error):
                    worker = psutil.Process(process.pid)
                    found += [worker, *worker.children(recursive=True)]
        return found


async def _value(handle: Any) -> Any:
    return await handle


def _is_done(handle: Any) -> bool:
    import ray

    return bool(ray.wait([handle], timeout=0)[0])


def _with_place(failure: Failure) -> Exception:
    failure.error.add_note(f"Raised in {failure.group.role} worker {failure.rank}.")
    return failure.error
