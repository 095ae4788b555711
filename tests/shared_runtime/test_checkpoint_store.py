"""The store under crashes at every instant, full disks, and repeated saves."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_runtime.checkpoint.saver import Saver
from shared_runtime.checkpoint.sentinel import SaveSentinel
from shared_runtime.checkpoint.store import DRIVER_STATE, TRACKER, CheckpointError, CheckpointStore
from shared_runtime.placement.groups import InProcessGroup

FILES = 3


def save(store: CheckpointStore, iteration: int, mark: str = "") -> None:
    """A checkpoint whose files all say which one they belong to."""
    with store.writing(iteration) as staging:
        (staging / "shards").mkdir()
        for i in range(FILES):
            (staging / "shards" / f"{i}.bin").write_text(f"{iteration}{mark} " * 100)
        store.write_driver_state(staging, {"iteration": iteration, "mark": mark})


def check(path: Path, store: CheckpointStore) -> tuple[int, str]:
    """Assert that a checkpoint is whole; return what it says it is."""
    state = store.read_driver_state(path)
    expected = f"{state['iteration']}{state['mark']} " * 100
    assert [(path / "shards" / f"{i}.bin").read_text() for i in range(FILES)] == [expected] * FILES
    assert path.name == f"iter_{state['iteration']:07d}"
    return state["iteration"], state["mark"]


def die_at(event: int, action: Callable[[], None]) -> bool:
    """Run an action in a child that is killed before its `event`-th file operation; return whether it got through."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFEXITED(status)


@pytest.mark.parametrize("again", [False, True], ids=["next", "same"])
def test_a_crash_at_every_file_operation(tmp_path: Path, again: bool) -> None:
    """Whatever instant the process dies at, a complete checkpoint loads, never an older one than before."""
    for event in range(1, 500):
        root = tmp_path / str(event)
        store = CheckpointStore(root, keep_last=2)
        save(store, 1)
        save(store, 2)
        iteration = 2 if again else 3
        finished = die_at(event, lambda store=store, iteration=iteration: save(store, iteration, "new"))
        store = CheckpointStore(root, keep_last=2)
        latest = store.latest()
        assert latest is not None
        found = check(latest, store)
        assert found in ([(2, ""), (2, "new")] if again else [(2, ""), (3, "new")])
        for path in store.complete():
            check(path, store)
        # The next save puts everything in order.
        save(store, 4)
        assert [path.name for path in store.complete()][-1] == "iter_0000004"
        kept = sorted(path.name for path in root.iterdir())
        assert len(kept) == 3, kept
        assert TRACKER in kept
        if finished:
            assert found[1] == "new"
            break
    else:
        pytest.fail("the save never finished")
    assert event > 20  # the hook did see the operations


def test_keep_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "deep" / "root", keep_last=2)
    assert store.latest() is None
    assert store.complete() == []
    for iteration in (1, 5, 10, 12):
        save(store, iteration)
    assert [path.name for path in store.complete()] == ["iter_0000010", "iter_0000012"]
    assert (store.root / TRACKER).read_text() == "12"
    one = CheckpointStore(tmp_path / "one", keep_last=1)
    save(one, 1)
    save(one, 2)
    assert [path.name for path in one.complete()] == ["iter_0000002"]
    every = CheckpointStore(tmp_path / "all", keep_last=None)
    for iteration in range(4):
        save(every, iteration)
    assert len(every.complete()) == 4
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        CheckpointStore(tmp_path, keep_last=0)


def test_the_old_one_goes_only_after_the_new_one_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    with store.writing(2) as staging:
        (staging / DRIVER_STATE).write_text("{}")
        assert [path.name for path in store.complete()] == ["iter_0000001"]
        assert store.latest() == tmp_path / "iter_0000001"
    assert [path.name for path in store.complete()] == ["iter_0000002"]


def test_an_exception_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(FloatingPointError), store.writing(2) as staging:  # noqa: PT012
        (staging / "half").write_text("x")
        raise FloatingPointError("not about the disk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]


def test_refusals(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3)
    with pytest.raises(CheckpointError, match=f"is one checkpoint; give its parent directory {tmp_path}"):
        CheckpointStore(tmp_path / "iter_0000003")
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(CheckpointError, match="names '7', which is not there; checkpoints: iter_0000003"):
        store.latest()
    (tmp_path / "iter_0000003" / DRIVER_STATE).write_text("{half")
    with pytest.raises(CheckpointError, match=r"driver\.json is damaged"):
        store.read_driver_state(tmp_path / "iter_0000003")
    (tmp_path / "iter_0000003" / DRIVER_STATE).unlink()
    with pytest.raises(CheckpointError, match=r"has no driver\.json"):
        store.read_driver_state(tmp_path / "iter_0000003")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tandem-test", str(disk)]).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("how", ["python", "torch"])
def test_a_full_disk(small_disk: Path, how: str) -> None:
    import torch

    from shared_runtime.checkpoint.sharded import load_sharded, save_sharded

    store = CheckpointStore(small_disk / "checkpoints")

    def write(iteration: int, kilobytes: int) -> None:
        with store.writing(iteration) as staging:
            if how == "torch":
                save_sharded({"w": torch.full((kilobytes * 256,), float(iteration))}, staging)
            else:
                (staging / "data").write_bytes(bytes(kilobytes * 1024))
            store.write_driver_state(staging, {"iteration": iteration})

    write(1, 60)
    with pytest.raises(CheckpointError, match=r"checkpoint 2 .* full .*; iter_0000001 is still there"):
        write(2, 400)
    latest = store.latest()
    assert latest is not None
    assert store.read_driver_state(latest) == {"iteration": 1}
    if how == "torch":
        state = {"w": torch.zeros(60 * 256)}
        load_sharded(state, latest)
        assert state["w"].eq(1.0).all()
    # The half-written files have given their room back.
    write(3, 60)
    assert store.latest() == store.root / "iter_0000003"


def test_a_file_size_limit_is_said_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="there is none before it"), store.writing(1):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_sentinel_survives_until_the_checkpoint_is_durable(tmp_path: Path) -> None:
    file = tmp_path / "save_now"
    sentinel = SaveSentinel(file)
    assert not sentinel.requested()
    # Asked for between the save point's look and the end of the save: not answered by this checkpoint.
    file.touch()
    sentinel.acknowledge()
    assert file.exists()
    assert sentinel.requested()
    # A crash while saving: the next run finds the request.
    assert SaveSentinel(file).requested()
    sentinel.acknowledge()
    assert not file.exists()
    sentinel.acknowledge()


def test_driver_state_is_json(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    state = {"rollouts": 3, "after": {"eval/sums": 0.5}, "reached_target": False}
    with store.writing(3) as staging:
        store.write_driver_state(staging, state)
    latest = store.latest()
    assert latest is not None
    assert store.read_driver_state(latest) == json.loads((latest / DRIVER_STATE).read_text()) == state


class Ranks:
    """A trainer, and a domain, of which the disk may be full."""

    full = False

    def save(self, directory: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (directory / "part").write_text("x")

    def load(self, directory: Path) -> None:
        assert (directory / "part").read_text() == "x"


def test_a_request_between_two_weight_updates_waits_for_the_next(tmp_path: Path) -> None:
    file = tmp_path / "save_now"
    file.touch()
    saver = Saver(CheckpointStore(tmp_path / "own"), interval=None, sentinel=file, update_weights_interval=3)
    assert [saver.due(n, last=False) for n in range(1, 7)] == [False, False, True, False, False, True]


def test_the_saver_answers_a_request_only_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    ranks, file = Ranks(), tmp_path / "save_now"
    trainers, store = InProcessGroup(ranks), CheckpointStore(tmp_path / "own")
    saver = Saver(store, interval=2, sentinel=file)
    assert [saver.due(n, last=n == 5) for n in range(1, 6)] == [False, True, False, True, True]
    file.touch()
    assert saver.due(1, last=False)
    ranks.full = True
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.save(1, trainers, ranks, {"rollouts": 1})
    assert file.exists()
    assert saver.resume(trainers, ranks) is None
    ranks.full = False
    assert saver.due(1, last=False)
    assert saver.save(1, trainers, ranks, {"rollouts": 1}) == tmp_path / "own" / "iter_0000001"
    assert not file.exists()
    assert saver.resume(trainers, ranks) == {"rollouts": 1}
    # Another run starts from it, and says so when there is nothing to start from.
    other = CheckpointStore(tmp_path / "other")
    assert Saver(other, interval=None, load=store.root).resume(trainers, ranks) == {"rollouts": 1}
    with pytest.raises(CheckpointError, match=r"--load .*nowhere holds no checkpoint"):
        Saver(other, interval=None, load=tmp_path / "nowhere").resume(trainers, ranks)
