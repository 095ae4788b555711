"""A whole update session between real models: what arrives, and what is left when something breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shared_runtime.engines.contract import UpdateReport
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, pack, tensor_meta
from shared_runtime.weight_sync.checksum import tensor_checksums
from shared_runtime.weight_sync.receiver import TensorReceiver, WeightUpdateError
from shared_runtime.weight_sync.session import publish
from shared_runtime.weight_sync.transports.object_store import ObjectStoreTransport


class Net(torch.nn.Module):
    """An embedding, a layer and a head, tied or not."""

    def __init__(self, seed: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.layer(self.embed(tokens))))
        return logits


class NetTrainer:
    """The publishing part of a trainer."""

    def __init__(self, seed: int, tied: bool, rank: int = 0) -> None:
        self.net, self.rank = Net(seed, tied), rank
        self.rename: dict[str, str] = {}
        self.before_export: Callable[[int], None] = lambda index: None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {self.rename.get(name, name): tensor.detach() for name, tensor in self.net.named_parameters()}

    def weight_metadata(self) -> list[TensorMeta]:
        return [tensor_meta(name, tensor) for name, tensor in self.tensors().items()]

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        self.before_export(index)
        tensors = self.tensors()
        return pack(index, [(name, tensors[name]) for name in names]) if self.rank == 0 else None

    def weight_checksums(self) -> dict[str, str]:
        return tensor_checksums(self.tensors())

    def logits(self) -> np.ndarray:
        with torch.no_grad():
            return self.net(torch.arange(11)).numpy()


class NetEngine:
    """The receiving part of an engine; it writes down what it is told."""

    def __init__(self, seed: int, tied: bool) -> None:
        self.net = Net(seed, tied)
        self.receiver = TensorReceiver(lambda: self.net.state_dict())
        self.calls: list[str] = []
        self.before_apply: Callable[[Bucket], Bucket] = lambda bucket: bucket
        self.paused = False

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused = True

    def flush_cache(self) -> None:
        self.calls.append("flush_cache")

    def begin_update(self, version: int, tensors: list[TensorMeta]) -> None:
        self.calls.append("begin_update")
        self.receiver.begin(version, tensors)

    def apply_bucket(self, bucket: Bucket) -> int:
        self.calls.append("apply_bucket")
        return self.receiver.apply(self.before_apply(bucket))

    def end_update(self) -> UpdateReport:
        self.calls.append("end_update")
        return self.receiver.end()

    def abort_update(self) -> None:
        self.calls.append("abort_update")
        self.receiver.abort()

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def weight_checksums(self) -> dict[str, str]:
        return self.receiver.checksums()

    def version(self) -> int:
        return self.receiver.version

    def logits(self) -> np.ndarray:
        self.receiver.check_usable()
        with torch.no_grad():
            return self.net(torch.arange(11)).numpy()


class LocalGroup(InProcessGroup):
    """Several workers in this process."""

    def __init__(self, *workers: Any) -> None:
        self.workers, self.size = workers, len(workers)

    def start(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        chosen = range(self.size) if workers is None else workers
        return [getattr(self.workers[i], method)(*args) for i in chosen]


def assert_unusable_until_published(trainers: Any, engines: LocalGroup) -> None:
    for engine in engines.workers:
        assert not engine.paused
        with pytest.raises(WeightUpdateError, match="publish the weights again"):
            engine.logits()
    publish(trainers, engines, 50, buffer_size=1000)
    for engine in engines.workers:
        assert engine.version() == 50
        assert np.array_equal(engine.logits(), trainers.call("logits")[0])


@pytest.mark.parametrize("tied", [True, False])
def test_after_an_update_the_engine_computes_what_the_trainer_does(tied: bool) -> None:
    trainer, engine = NetTrainer(0, tied), NetEngine(1, tied)
    trainers, engines = InProcessGroup(trainer), InProcessGroup(engine)
    assert np.abs(engine.logits() - trainer.logits()).max() > 0.01
    metrics = publish(trainers, engines, 9, buffer_size=10_000, check_equal=True)
    assert np.array_equal(engine.logits(), trainer.logits())
    assert engine.version() == 9
    assert engine.calls == ["pause", "flush_cache", "begin_update", "apply_bucket", "end_update", "resume"]
    num_floats = 11 * 6 * (1 if tied else 2) + 6 * 6 + 6
    assert metrics["perf/update_weights_bytes"] == 4 * num_floats
    assert metrics["perf/update_weights_tensors"] == (3 if tied else 4)
    assert metrics["perf/update_weights_buckets"] == 1
    assert (engine.net.head.weight is engine.net.embed.weight) == tied


def test_several_buckets_are_one_session() -> None:
    trainer, engine = NetTrainer(0, False), NetEngine(1, False)
    metrics = publish(InProcessGroup(trainer), InProcessGroup(engine), 2, buffer_size=200)
    # 264 bytes embedding, 144 + 24 layer (32 with alignment), 264 head: three buckets.
    assert metrics["perf/update_weights_buckets"] == 3
    assert engine.calls == ["pause", "flush_cache", "begin_update", *["apply_bucket"] * 3, "end_update", "resume"]
    assert np.array_equal(engine.logits(), trainer.logits())


def test_an_atomic_group_arrives_in_one_bucket() -> None:
    trainer, engine = NetTrainer(0, False), NetEngine(1, False)
    seen: list[set[str]] = []

    def note(bucket: Bucket) -> Bucket:
        seen.append({meta.name for meta in bucket.tensors})
        return bucket

    engine.before_apply = note
    groups = [("embed.weight", "head.weight")]
    publish(InProcessGroup(trainer), InProcessGroup(engine), 2, buffer_size=1, atomic_groups=groups)
    assert seen == [{"embed.weight", "head.weight"}, {"layer.weight"}, {"layer.bias"}]


def test_at_most_two_buckets_are_in_flight() -> None:
    alive: list[int] = []

    class Trainers:
        size = 2

        def start(self, method: str, names: tuple[str, ...], index: int) -> list[str]:
            alive.append(index)
            assert len(alive) <= 2
            return [f"bucket {index}", f"rank 1 of {index}"]

        def wait(self, handles: list[str]) -> list[None]:
            assert handles == [f"rank 1 of {alive[0]}"]
            return [None]

    class Engines:
        size = 3

        def start(self, method: str, handle: str) -> list[str]:
            assert handle == f"bucket {alive[-1]}"  # the handle itself, unopened
            return [handle] * 3

        def wait(self, handles: list[str]) -> list[int]:
            assert handles == [f"bucket {alive.pop(0)}"] * 3
            return [1, 1, 1]

    from shared_runtime.weight_sync.transports.base import UpdatePlan

    plan = UpdatePlan(version=1, tensors=(), buckets=tuple((str(i),) for i in range(5)))
    assert ObjectStoreTransport().transfer(Trainers(), Engines(), plan) == [5, 5, 5]  # type: ignore[arg-type]
    assert not alive


def test_ranks_other_than_the_first_export_nothing_and_every_engine_is_updated() -> None:
    trainers = LocalGroup(NetTrainer(0, True), NetTrainer(0, True, rank=1))
    engines = LocalGroup(NetEngine(1, True), NetEngine(2, True))
    publish(trainers, engines, 3, buffer_size=300, check_equal=True)
    for engine in engines.workers:
        assert np.array_equal(engine.logits(), trainers.workers[0].logits())


def test_a_renamed_tensor_is_an_error_that_names_both_sides() -> None:
    trainer, engines = NetTrainer(0, False), LocalGroup(NetEngine(1, False), NetEngine(2, False))
    trainer.rename = {"layer.bias": "base_model.layer.bias"}
    trainers = InProcessGroup(trainer)
    with pytest.raises(WeightUpdateError, match=r"unknown to the engine: base_model.layer.bias; missing.*: layer.bias"):
        publish(trainers, engines, 4, buffer_size=1000)
    trainer.rename = {}
    assert_unusable_until_published(trainers, engines)


def test_an_untied_trainer_does_not_fit_a_tied_engine() -> None:
    trainers, engines = InProcessGroup(NetTrainer(0, False)), LocalGroup(NetEngine(1, True))
    with pytest.raises(WeightUpdateError, match=r"publish it once: embed\.weight = head\.weight"):
        publish(trainers, engines, 4, buffer_size=1000)


def test_a_corrupt_bucket_leaves_no_engine_with_it() -> None:
    trainer = NetTrainer(0, False)
    engines = LocalGroup(NetEngine(1, False), NetEngine(2, False))

    def corrupt(bucket: Bucket) -> Bucket:
        data = bucket.data.copy()
        data[-20] ^= 1
        return Bucket(bucket.index, bucket.tensors, data, bucket.checksum)

    engines.workers[1].before_apply = lambda bucket: corrupt(bucket) if bucket.index == 1 else bucket
    with pytest.raises(ValueError, match="bucket 1 is corrupt"):
        publish(InProcessGroup(trainer), engines, 4, buffer_size=200)
    engines.workers[1].before_apply = lambda bucket: bucket
    assert_unusable_until_published(InProcessGroup(trainer), engines)


def test_a_trainer_that_fails_in_the_middle() -> None:
    trainer = NetTrainer(0, False)
    engines = LocalGroup(NetEngine(1, False), NetEngine(2, False))

    def fail(index: int) -> None:
        if index == 2:
            raise OSError("the gather of bucket 2 failed")

    trainer.before_export = fail
    with pytest.raises(OSError, match="gather of bucket 2"):
        publish(InProcessGroup(trainer), engines, 4, buffer_size=200)
    assert engines.workers[0].calls[-2:] == ["abort_update", "resume"]
    trainer.before_export = lambda index: None
    assert_unusable_until_published(InProcessGroup(trainer), engines)


def test_an_engine_that_can_not_even_be_told_is_noted_and_the_others_go_on() -> None:
    engines = LocalGroup(NetEngine(1, False), NetEngine(2, False))

    def die(*_: Any) -> None:
        raise ConnectionError("gone")

    engines.workers[0].before_apply = die
    engines.workers[0].abort_update = die
    with pytest.raises(ConnectionError) as raised:
        publish(InProcessGroup(NetTrainer(0, False)), engines, 4, buffer_size=1000)
    assert raised.value.__notes__ == ["abort_update failed on engine 0 as well: ConnectionError: gone"]
    assert [engine.paused for engine in engines.workers] == [False, False]
    assert engines.workers[1].calls[-2:] == ["abort_update", "resume"]


def test_a_tensor_that_an_engine_swallows_is_noticed() -> None:
    engine = NetEngine(1, False)
    apply = engine.receiver.apply

    def swallow(bucket: Bucket) -> int:
        return apply(bucket) - (bucket.index == 1)

    engine.receiver.apply = swallow  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"4 tensors were sent for weight version 4, applied by engine 0: 3"):
        publish(InProcessGroup(NetTrainer(0, False)), InProcessGroup(engine), 4, buffer_size=200)


def test_a_silently_wrong_value_is_found_by_the_comparison_only() -> None:
    trainer, engine = NetTrainer(0, False), NetEngine(1, False)
    end = engine.receiver.end

    def disturb() -> UpdateReport:
        with torch.no_grad():
            engine.net.layer.bias[3] += 1e-7
        return end()

    engine.receiver.end = disturb  # type: ignore[method-assign]
    trainers, engines = InProcessGroup(trainer), LocalGroup(engine)
    publish(trainers, engines, 4, buffer_size=1000)
    with pytest.raises(ValueError, match=r"engine 0 .*different bytes: layer\.bias"):
        publish(trainers, engines, 5, buffer_size=1000, check_equal=True)
    engine.receiver.end = end  # type: ignore[method-assign]
    assert_unusable_until_published(trainers, engines)
