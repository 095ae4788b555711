"""Worker groups on one real Ray cluster: what they do, how they fail, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from shared_runtime.placement.cluster import Cluster, ClusterError, ray_cluster
from shared_runtime.placement.failures import WorkerDied
from shared_runtime.placement.layout import Pool, lay_out
from shared_runtime.placement.ray_group import RayWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class UnknownTensor(Exception):
    """An exception type of the workers' own."""


class Worker:
    def __init__(self, name: str, weights: Any = None) -> None:
        self.name = name
        self.weights = weights

    def whoami(self) -> dict[str, Any]:
        import threading

        return {
            "name": self.name,
            "pid": os.getpid(),
            "omp": os.environ["OMP_NUM_THREADS"],
            "cwd_on_path": os.getcwd() in sys.path,
            "main_thread": threading.current_thread() is threading.main_thread(),
        }

    def add(self, a: int, b: int) -> int:
        return a + b

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return self.name

    def fail(self, message: str) -> None:
        raise UnknownTensor(message)

    def last_words(self) -> None:
        print("a line before the end", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def big(self, size: int) -> np.ndarray:
        return np.arange(size, dtype=np.uint8)

    def measure(self, array: np.ndarray) -> tuple[int, bool, bool]:
        return int(array.sum()), array.flags.writeable, array.flags.owndata

    def child(self) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid


class Rank:
    """A worker that uses torch.distributed as under torchrun."""

    def all_reduce(self) -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return dist.get_rank(), value.item()

    def fail_on(self, rank: int, how: str) -> None:
        import torch.distributed as dist

        self.all_reduce()
        if dist.get_rank() == rank:
            if how == "raise":
                # The connection goes first: the other rank's complaint may arrive before the reason.
                dist.destroy_process_group()
                time.sleep(0.5)
                raise UnknownTensor("the real reason")
            os.kill(os.getpid(), signal.SIGKILL)
        self.all_reduce()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    layout = lay_out([Pool((2,), {"actor": 1, "rollout": 1, "engine": 2})])
    with ray_cluster(layout) as cluster:
        yield cluster


def workers(cluster: Cluster, role: str = "actor", **options: Any) -> RayWorkerGroup:
    return RayWorkerGroup(Worker, [{"name": "a"}, {"name": "b"}], cluster=cluster, role=role, **options)


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not left
    return True


def test_calls_and_handles(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    group = workers(cluster)
    engines = RayWorkerGroup(
        Worker, [{"name": "e", "weights": ray.put([1, 2])}], cluster=cluster, role="engine", num_threads=3
    )
    facts = group.call("whoami")
    assert [fact["name"] for fact in facts] == ["a", "b"]
    assert group.pids() == [fact["pid"] for fact in facts]
    assert all(fact["main_thread"] and fact["cwd_on_path"] for fact in facts)
    assert facts[0]["omp"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert engines.call("whoami")[0]["omp"] == "3"
    assert group.call("add", 1, 2) == [3, 3]
    assert group.call_each("add", [(1, 2), (3, 4)]) == [3, 7]
    assert group.wait(group.start("nap", 0.0, workers=[1])) == ["b"]

    # A handle goes to another group without passing the driver; bytes arrive without a copy.
    size = 8 << 20
    handles = group.start("big", size, workers=[0])
    expected = int(np.arange(size, dtype=np.uint8).sum())
    assert engines.wait(engines.start("measure", handles[0])) == [(expected, False, False)]

    async def both() -> list[Any]:
        return await asyncio.gather(*[group.wait_async(handle) for handle in group.start("nap", 1.2)])

    started = time.monotonic()
    assert asyncio.run(both()) == ["a", "b"]
    assert time.monotonic() - started < 2.3 + 5

    # Children of the workers end with them.
    child = group.call("child")
    pids = group.pids() + child + engines.pids()
    group.shutdown()
    engines.shutdown()
    assert gone(pids)
    with pytest.raises(RuntimeError, match="'actor' workers have been shut down"):
        group.call("whoami")


def test_an_exception_of_an_independent_worker_keeps_the_group(cluster: Cluster) -> None:
    group = workers(cluster)
    with pytest.raises(UnknownTensor, match="no tensor 'x'") as caught:
        group.call("fail", "no tensor 'x'")
    assert "raise UnknownTensor(message)" in str(caught.value)
    assert "Raised in actor worker" in "".join(caught.value.__notes__)
    with pytest.raises(UnknownTensor):
        asyncio.run(group.wait_async(group.start("fail", "again", workers=[1])[0]))
    assert group.call("add", 2, 2) == [4, 4]
    group.shutdown()


def test_a_constructor_that_raises(cluster: Cluster) -> None:
    group = RayWorkerGroup(Worker, [{"nane": "a"}, {"name": "b"}], cluster=cluster, role="actor")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nane'"):
        group.call("whoami")
    with pytest.raises(TypeError, match="nane"):
        group.start("whoami")


def test_the_real_exception_comes_first(cluster: Cluster) -> None:
    group = RayWorkerGroup(Rank, [{}, {}], cluster=cluster, role="actor", collective=True)
    assert group.call("all_reduce") == [(0, 3.0), (1, 3.0)]
    pids = group.pids()
    started = time.monotonic()
    with pytest.raises(UnknownTensor, match="the real reason") as caught:
        group.call("fail_on", 1, "raise")
    assert time.monotonic() - started < 30
    assert "Raised in actor worker 1." in caught.value.__notes__
    # The others would wait for rank 1 forever.
    assert gone(pids)


def test_a_killed_rank_is_named_not_its_peer(cluster: Cluster) -> None:
    group = RayWorkerGroup(Rank, [{}, {}], cluster=cluster, role="actor", collective=True)
    pids = group.pids()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"actor worker 1 \(pid {pids[1]}\) died: .*SIGKILL"):
        group.call("fail_on", 1, "kill")
    assert time.monotonic() - started < 30
    assert gone(pids)


def test_last_lines_and_crashes(cluster: Cluster) -> None:
    group = workers(cluster)
    with pytest.raises(WorkerDied, match="a line before the end"):
        group.wait(group.start("last_words", workers=[0]))
    group = workers(cluster)
    with pytest.raises(WorkerDied, match=r"actor worker 1 .* it crashed, .*(SIGSEGV|Segmentation)"):
        group.wait(group.start("crash", workers=[1]))


def test_a_worker_of_another_group_dies_during_a_long_wait(cluster: Cluster) -> None:
    group, engines = workers(cluster), workers(cluster, role="rollout")
    victim = engines.pids()[0]
    handles = group.start("nap", 60)
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rollout worker 0 \(pid {victim}\)"):
        group.wait(handles)
    assert time.monotonic() - started < 30
    assert gone(group.pids() if not group._closed else [])

    group, engines = workers(cluster), workers(cluster, role="rollout")
    victim = group.pids()[1]
    engines.pids()

    async def wait() -> None:
        waiting = asyncio.ensure_future(engines.wait_async(engines.start("nap", 60)[0]))
        await asyncio.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        await waiting

    with pytest.raises(WorkerDied, match=rf"actor worker 1 \(pid {victim}\)"):
        asyncio.run(wait())


def test_calls_cost_little_more_than_ray(cluster: Cluster) -> None:
    import ray

    engine = RayWorkerGroup(Worker, [{"name": "e"}], cluster=cluster, role="engine")
    engine.call("add", 1, 1)
    actor = engine._actors[0]

    def ours() -> None:
        engine.call("add", 1, 1)

    def bare() -> None:
        ray.get(actor.call.remote("add", 1, 1))

    seconds = {ours: [], bare: []}
    for _ in range(200):
        for function, times in seconds.items():
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    engine.shutdown()
    # Medians of alternating pairs: the same noise falls on both.
    assert np.median(seconds[ours]) < 1.3 * np.median(seconds[bare]) + 2e-4


def test_wrong_roles_and_counts(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"no role 'critic'; it has \['actor', 'engine', 'rollout'\]"):
        RayWorkerGroup(Worker, [{}], cluster=cluster, role="critic")
    with pytest.raises(ValueError, match="role 'actor' has 2 workers, got arguments for 1"):
        RayWorkerGroup(Worker, [{}], cluster=cluster, role="actor")
    with pytest.raises(ClusterError, match=r"already initialised"), ray_cluster(cluster.layout):
        pass
