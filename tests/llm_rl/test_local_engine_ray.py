"""Publication over real Ray actors: two trainer ranks, two engines, buckets through the object store."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llm_rl.engines.local import LocalEngine
from llm_rl.sample import GenerateRequest, SamplingParams
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.placement.cluster import Cluster, ray_cluster
from shared_runtime.placement.layout import ACTOR, ROLLOUT, Pool, lay_out
from shared_runtime.placement.ray_group import RayWorkerGroup
from shared_runtime.weight_sync.bucket import Bucket
from shared_runtime.weight_sync.session import publish

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REQUESTS = [
    GenerateRequest(str(seed), (6, 10, 13, 3, 8, 14), SamplingParams(max_new_tokens=8), seed) for seed in range(6)
]


class MovingTrainer(FsdpTrainer):
    """A trainer whose weights can be moved without training, and whose export can be made to fail."""

    fail_at: int | None = None

    def move(self) -> None:
        generator = torch.Generator().manual_seed(7 + self.rank)
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local()  # type: ignore[operator]
                local.add_(torch.randn(local.shape, generator=generator) * 0.2)

    def whole_weights(self) -> dict[str, np.ndarray]:
        return {name: p.full_tensor().detach().numpy() for name, p in self.model.named_parameters()}  # type: ignore[operator]

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        bucket = super().export_bucket(names, index)
        if bucket is not None and index == self.fail_at:
            bucket.data[5] ^= 1
        return bucket

    def set_fail_at(self, index: int | None) -> None:
        self.fail_at = index


class WatchedEngine(LocalEngine):
    """An engine that says whether its buckets came without a copy, and that can be killed in the middle."""

    die_at: int | None = None
    seen: list[tuple[int, bool]]

    def apply_bucket(self, bucket: Bucket) -> int:
        self.__dict__.setdefault("seen", []).append((bucket.index, bucket.data.flags.writeable))
        if bucket.index == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().apply_bucket(bucket)

    def get_seen(self) -> list[tuple[int, bool]]:
        seen, self.seen = self.seen, []
        return seen

    def set_die_at(self, index: int) -> None:
        self.die_at = index


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_cluster(lay_out([Pool((2,), {ACTOR: 1, ROLLOUT: 1})])) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trainers(cluster: Cluster, tiny_model_dir: Path) -> Iterator[RayWorkerGroup]:
    settings = FsdpTrainerSettings(hf_checkpoint=tiny_model_dir, train_dtype="fp32", lr=1e-3, device="cpu")
    per_rank: list[dict[str, Any]] = [
        {"settings": settings, "rank": rank, "world_size": 2, "init_method": "env://"} for rank in range(2)
    ]
    group = RayWorkerGroup(MovingTrainer, per_rank, cluster=cluster, role=ACTOR, collective=True)
    group.call("init")
    group.call("move")
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def engines(cluster: Cluster, tiny_model_dir: Path) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(WatchedEngine, [{"model_dir": tiny_model_dir}] * 2, cluster=cluster, role=ROLLOUT)
    yield group
    group.shutdown()


def expected_outputs(
    model_dir: Path, weights: dict[str, np.ndarray]
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What an engine in this process gives with the trainers' whole weights."""
    engine = LocalEngine(model_dir)
    engine.model.load_state_dict({name: torch.from_numpy(w.copy()) for name, w in weights.items()}, strict=False)
    return engine.generate(REQUESTS)


def test_two_ranks_publish_to_two_engines(
    trainers: RayWorkerGroup, engines: RayWorkerGroup, tiny_model_dir: Path
) -> None:
    expected = expected_outputs(tiny_model_dir, trainers.call("whole_weights")[0])
    stale = engines.call("generate", REQUESTS)
    assert [output.output_ids for output in stale[0]] != [output.output_ids for output in expected]

    metrics = publish(trainers, engines, 1, buffer_size=400_000, check_equal=True)
    buckets = int(metrics["perf/update_weights_buckets"])
    assert buckets > 5
    for outputs in engines.call("generate", REQUESTS):
        assert {output.weight_version for output in outputs} == {1}
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.output_ids == wanted.output_ids
            np.testing.assert_allclose(output.log_probs, wanted.log_probs, atol=1e-5)
    # Every bucket once, in order, and mapped from shared memory: what Ray deserialises from there is read-only.
    assert engines.call("get_seen") == [[(index, False) for index in range(buckets)]] * 2

    trainers.call("set_fail_at", 3)
    with pytest.raises(ValueError, match="bucket 3 is corrupt"):
        publish(trainers, engines, 2, buffer_size=400_000)
    for engine in range(2):
        with pytest.raises(RuntimeError, match="update to weight version 2 failed; publish the weights again"):
            engines.wait(engines.start("generate", REQUESTS, workers=[engine]))
    trainers.call("set_fail_at", None)
    publish(trainers, engines, 3, buffer_size=1 << 30)
    assert {o.weight_version for outputs in engines.call("generate", REQUESTS) for o in outputs} == {3}


def test_an_engine_that_dies_in_the_middle_ends_the_update(trainers: RayWorkerGroup, engines: RayWorkerGroup) -> None:
    engines.wait(engines.start("set_die_at", 2, workers=[1]))
    with pytest.raises(Exception, match=r"rollout.* 1") as raised:
        publish(trainers, engines, 5, buffer_size=400_000)
    assert "abort_update failed on engine 1 as well" in "".join(raised.value.__notes__)
    # The trainers are unharmed: their ranks still gather together.
    assert len(trainers.call("whole_weights")[0]) == 46
