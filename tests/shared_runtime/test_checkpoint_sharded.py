"""Shards at other numbers of ranks, and real saves that are killed at random moments."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared_runtime.checkpoint.rng import load_rng, save_rng
from shared_runtime.checkpoint.sharded import ShardError, load_sharded, save_sharded
from shared_runtime.checkpoint.store import CheckpointStore


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the ranks, importable in them under the same name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import sharded_ranks

    yield sharded_ranks
    sys.modules.pop("sharded_ranks")


def run_ranks(helpers: Any, world_size: int, meeting: Path, load: Path | None, save: Path | None) -> None:
    # Ranks are forked from one process that has imported torch already.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.tensor"])
    ranks = [
        context.Process(target=helpers.main, args=(rank, world_size, meeting, load, save)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=300)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size


@pytest.mark.ranks
def test_two_ranks_to_one_to_four(helpers: Any, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    run_ranks(helpers, 2, tmp_path / "meet2", None, two)
    # One rank, here, without a process group.
    state = helpers.whole_state(fill=-1)
    load_sharded(state, two)
    helpers.assert_equal(state)
    save_sharded(state, one)
    for rank in range(2):
        torch.manual_seed(rank)
        torch.rand(1)
        save_rng(one, rank)
    run_ranks(helpers, 4, tmp_path / "meet4", one, None)


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    save_sharded({"model": {"w": torch.zeros(3)}}, tmp_path)
    with pytest.raises(ShardError, match=r"rank 0: .*model\.v"):
        load_sharded({"model": {"w": torch.zeros(3), "v": torch.zeros(3)}}, tmp_path)
    with pytest.raises(ShardError, match=r"rank 0: .*Size mismatch .* for model\.w"):
        load_sharded({"model": {"w": torch.zeros(4)}}, tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no sharded checkpoint"):
        load_sharded({}, tmp_path / "elsewhere")


def test_generators_go_on(tmp_path: Path) -> None:
    np.random.standard_normal()  # leaves the second of a pair behind, which is state too

    def draw() -> tuple[float, ...]:
        return torch.rand(1).item(), random.random(), np.random.rand(), np.random.standard_normal()

    save_rng(tmp_path, 3)
    expected = draw()
    assert draw() != expected
    assert load_rng(tmp_path, 3)
    assert draw() == expected
    assert not load_rng(tmp_path, 2)


@pytest.mark.slow
def test_saves_killed_at_random_moments(tmp_path: Path) -> None:
    """A process that saves in a loop is killed again and again; its successor goes on from what is there."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    delays = random.Random(0)
    newest = 0
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                save_forever(store, newest)
            finally:
                os._exit(1)
        time.sleep(delays.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        latest = store.latest()
        if latest is None:
            assert newest == 0
            continue
        iteration = store.read_driver_state(latest)["iteration"]
        assert iteration >= newest
        newest = iteration
        for path in store.complete():
            state = {"w": torch.zeros(1000), "moments": torch.zeros(50, 50)}
            load_sharded(state, path)
            number = float(store.read_driver_state(path)["iteration"])
            assert path.name == f"iter_{int(number):07d}"
            assert state["w"].eq(number).all()
            assert state["moments"].eq(-number).all()
    assert newest > 3


def save_forever(store: CheckpointStore, iteration: int) -> None:
    while True:
        iteration += 1
        with store.writing(iteration) as staging:
            value = float(iteration)
            save_sharded({"w": torch.full((1000,), value), "moments": torch.full((50, 50), -value)}, staging)
            store.write_driver_state(staging, {"iteration": iteration})
