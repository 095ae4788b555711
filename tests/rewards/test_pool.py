"""The worker pool on a real local Ray: order, mixed types, placement, a worker that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rewards import LabelError, RewardError, RewardRequest, score
from rewards.image.api import ApiRewardActor
from tests.rewards.image_helpers import random_image

ray = pytest.importorskip("ray", reason="the extra tandem-rewards[ray] is not installed")
pool_module = pytest.importorskip("rewards.pool")

pytestmark = pytest.mark.ray


class DeadlyActor(ApiRewardActor):
    """Ends its process as often as a directory has fuses left."""

    def __init__(self, fuses: str) -> None:
        self.fuses = Path(fuses)

    def build_request(self, request: RewardRequest) -> Any:
        return request.prompt

    def send_request(self, payload: Any, name: str) -> Any:
        for fuse in sorted(self.fuses.iterdir()) if payload == "deadly" else []:
            fuse.unlink()
            os._exit(1)
        time.sleep(0.02)
        return 1.0

    def parse_response(self, response: Any) -> float:
        return response


class VisibleDevices(ApiRewardActor):
    """Scores by the number of GPUs that its process may see; -1 is all of them."""

    def build_request(self, request: RewardRequest) -> Any:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def send_request(self, payload: Any, name: str) -> Any:
        return -1.0 if payload is None else float(len([device for device in payload.split(",") if device]))

    def parse_response(self, response: Any) -> float:
        return response


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    # Under `uv run`, Ray would start each worker by `uv run` in a copy of the working directory.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV", False)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as in a run
        ray.init(include_dashboard=False, num_cpus=4, num_gpus=1, resources={"slot": 2}, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def math_pool(_cluster: None) -> Iterator[Any]:
    pool = pool_module.RewardPool("math", num_workers=2, batch_size=8, num_cpus_per_worker=0.5)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def fuses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuses")


@pytest.fixture(scope="module")
def deadly_pool(_cluster: None, fuses: Path) -> Iterator[Any]:
    """Two workers, batches of two: a request "deadly" ends as many workers as there are fuses."""
    config = fuses.with_suffix(".yaml")
    config.write_text(f"actor_class: {DeadlyActor.__module__}.DeadlyActor\nactor_kwargs: {{fuses: {fuses}}}\n")
    options = {"custom_api": {"config": str(config)}}
    pool = pool_module.RewardPool("custom_api", num_workers=2, batch_size=2, num_cpus_per_worker=0.5, options=options)
    yield pool
    pool.shutdown()


def light(fuses: Path, count: int) -> None:
    for index in range(count):
        (fuses / str(index)).touch()


def test_a_pool_scores_as_one_process_does(math_pool: Any) -> None:
    requests = [RewardRequest(str(i % 7), "5") for i in range(50)]
    requests += [RewardRequest("cat", "the cat", metadata={"rm_type": "f1"})]
    requests += [RewardRequest(image=random_image(i), metadata={"rm_type": "jpeg_compressibility"}) for i in range(3)]
    expected = score(requests, "math")
    before = math_pool.metrics()
    assert math_pool.score(requests) == expected
    assert asyncio.run(math_pool.score_async(requests[:9])) == expected[:9]
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(lambda _: math_pool.score(requests), range(4))) == [expected] * 4
    metrics = math_pool.metrics()
    assert metrics["reward_pool/math/queue_depth"] == 0
    assert metrics["reward_pool/math/samples"] == before["reward_pool/math/samples"] + 5 * 54 + 9
    assert metrics["reward_pool/math/batches"] == before["reward_pool/math/batches"] + 5 * 7 + 2
    assert metrics["reward_pool/math/worker_restarts"] == before["reward_pool/math/worker_restarts"]
    assert math_pool.score([]) == []


def test_errors_of_rewards_come_out_as_they_are(math_pool: Any) -> None:
    requests = [RewardRequest("5", "5") for _ in range(20)]
    requests[14] = RewardRequest("5", None)
    with pytest.raises(LabelError, match="sample 14 has label None"):
        math_pool.score(requests)
    assert math_pool.metrics()["reward_pool/math/queue_depth"] == 0
    assert math_pool.score(requests[:14]) == [1.0] * 14


def test_what_cannot_be_scored_fails_alone(math_pool: Any) -> None:
    requests = [RewardRequest("5", "5") for _ in range(20)]
    requests[14] = RewardRequest("5", None)
    results = math_pool.score_each(requests)
    assert isinstance(results.pop(14), LabelError)
    assert results == [1.0] * 19


def test_batches_go_round_and_queues_are_counted(deadly_pool: Any) -> None:
    ray.get([actor.process_id.remote() for actor in deadly_pool.actors()])
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(deadly_pool.score, [RewardRequest(prompt=str(i)) for i in range(80)])
        deepest = 0.0
        while not running.done():
            time.sleep(0.005)
            deepest = max(deepest, deadly_pool.metrics()["reward_pool/custom_api/queue_depth_max"])
        assert running.result() == [1.0] * 80
    assert 1 <= deepest <= 20  # 40 batches of two over two workers
    name = "perf/reward_max_queue_depth_custom_api"
    assert deepest - 1 <= deadly_pool.pop_metrics()[name] <= 19  # of those before the last one
    assert deadly_pool.pop_metrics()[name] == 0
    deadly_pool.score([RewardRequest(prompt="one")])
    assert deadly_pool.pop_metrics()[name] == 0  # nothing waited


def test_a_worker_that_dies_is_replaced_and_its_batch_tried_once_more(deadly_pool: Any, fuses: Path) -> None:
    light(fuses, 1)
    before = deadly_pool.metrics()["reward_pool/custom_api/worker_restarts"]
    requests = [RewardRequest(prompt="deadly" if i == 3 else "fine") for i in range(10)]
    assert deadly_pool.score(requests) == [1.0] * 10
    assert deadly_pool.metrics()["reward_pool/custom_api/worker_restarts"] == before + 1


def test_a_worker_that_is_killed_is_replaced(math_pool: Any) -> None:
    first = math_pool.actors()[0]
    os.kill(ray.get(first.process_id.remote()), signal.SIGKILL)
    assert math_pool.score([RewardRequest("5", "5")] * 32) == [1.0] * 32
    assert math_pool.actors()[0] is not first


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_worker_sees_the_gpu_it_has_a_share_of_and_no_other(tmp_path: Path, share: float) -> None:
    """The GPU is only a number of Ray's here: what counts is what CUDA would be told."""
    config = tmp_path / "devices.yaml"
    config.write_text(f"actor_class: {VisibleDevices.__module__}.VisibleDevices\nactor_kwargs: {{}}\n")
    options = {"custom_api": {"config": str(config)}}
    pool = pool_module.RewardPool("custom_api", num_cpus_per_worker=0.5, num_gpus_per_worker=share, options=options)
    assert pool.score([RewardRequest(prompt="?")]) == [1.0 if share else 0.0]
    pool.shutdown()


def test_a_batch_that_kills_two_workers_names_its_samples(deadly_pool: Any, fuses: Path) -> None:
    light(fuses, 2)
    requests = [RewardRequest(prompt="deadly" if i == 1 else "fine", sample_id=f"s{i}") for i in range(4)]
    with pytest.raises(RewardError, match="lost two workers to samples s0, s1"):
        deadly_pool.score(requests)
    assert deadly_pool.score(requests) == [1.0] * 4  # the fuses are burnt, and the pool has all its workers again
    light(fuses, 2)
    lost, also, *others = deadly_pool.score_each(requests)
    assert isinstance(lost, RewardError)
    assert also is lost
    assert others == [1.0, 1.0]


def test_colocated_pools_share_the_bundles() -> None:
    group = ray.util.placement_group([{"CPU": 0.5, "slot": 1}] * 2)
    ray.get(group.ready())
    ledger = pool_module.SlotLedger(group.bundle_count)
    shares = {"num_cpus_per_worker": 0.1, "resources_per_worker": {"slot": 0.2}}
    first = pool_module.RewardPool("math", num_workers=1, placement_group=group, ledger=ledger, **shares)
    second = pool_module.RewardPool("f1", num_workers=1, placement_group=group, ledger=ledger, **shares)
    assert first.score([RewardRequest("5", "5")]) == [1.0]
    assert second.score([RewardRequest("cat", "cat")]) == [1.0]
    with pytest.raises(ValueError, match=r"ocr wants 1 colocated workers and 0 bundles are free.*--reward-num-workers"):
        pool_module.RewardPool("ocr", num_workers=1, placement_group=group, ledger=ledger)
    first.shutdown()
    assert ledger.take(1, "ocr") == [0]
    second.shutdown()
    ray.util.remove_placement_group(group)
