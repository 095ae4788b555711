"""One weight update, from the trainers to all engines: pause, flush, begin, transfer, end, resume.

Whatever the transport, an update is one session: the engines stop, accept the list of tensors, receive every bucket,
count the new version from the end of the session on, and go on. If anything fails in between, every engine closes its
update as failed (it then refuses to generate until one succeeds) and takes requests again, so none is left paused or
half updated, and the failure is raised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.weight_sync.bucket import TensorMeta, plan_buckets
from shared_runtime.weight_sync.checksum import compare_checksums
from shared_runtime.weight_sync.transports.base import UpdatePlan, WeightTransport
from shared_runtime.weight_sync.transports.object_store import ObjectStoreTransport


def publish(
    trainers: WorkerGroup,
    engines: WorkerGroup,
    version: int,
    *,
    buffer_size: int,
    transport: WeightTransport | None = None,
    atomic_groups: Sequence[Sequence[str]] = (),
    check_equal: bool = False,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights.

    Args:
        trainers: Ranks with `weight_metadata` and `export_bucket`, and `weight_checksums` if `check_equal` is set.
        engines: Workers with the verbs of :class:`~shared_runtime.engines.contract.WeightReceiver`.
        version: What the engines stamp on their outputs from now on.
        buffer_size: Largest bucket in bytes (a larger tensor or atomic group travels alone).
        transport: How buckets travel; by default through the object store.
        atomic_groups: Names that must arrive in one bucket.
        check_equal: Compare the SHA-256 of every tensor afterwards.

    Returns:
        `perf/update_weights_bytes`, `perf/update_weights_tensors`, `perf/update_weights_buckets` and
        `perf/update_weights_pause_time`, the seconds for which the engines stood still.

    Raises:
        Exception: What the failing worker raised, with notes on engines that could not even be told.
        RuntimeError: An engine applied another number of tensors than was sent, or reports another version.
        ValueError: With `check_equal`, an engine holds other bytes than the trainer.
    """
    metas: list[TensorMeta] = trainers.call("weight_metadata")[0]
    buckets = plan_buckets(metas, buffer_size, atomic_groups)
    plan = UpdatePlan(version=version, tensors=tuple(metas), buckets=tuple(buckets))
    started = time.perf_counter()
    try:
        # A worker takes calls in order, so these three need one round trip.
        opening = engines.start("pause") + engines.start("flush_cache") + engines.start("begin_update", version, metas)
        engines.wait(opening)
        applied = (transport or ObjectStoreTransport()).transfer(trainers, engines, plan)
        _check_counts(applied, plan)
        for engine, report in enumerate(engines.call("end_update")):
            if (report.version, report.num_tensors) != (version, len(metas)):
                raise RuntimeError(
                    f"engine {engine} ended the update to version {version} ({len(metas)} tensors) with {report}"
                )
        if check_equal:
            _check_equal(trainers, engines)
    except BaseException as error:
        _give_up(engines, error)
        raise
    engines.call("resume")
    return {
        "perf/update_weights_bytes": float(sum(meta.nbytes for meta in metas)),
        "perf/update_weights_tensors": float(len(metas)),
        "perf/update_weights_buckets": float(len(buckets)),
        "perf/update_weights_pause_time": time.perf_counter() - started,
    }


def _check_counts(applied: Sequence[int], plan: UpdatePlan) -> None:
    """Every engine must have applied every tensor that was sent."""
    sent = len(plan.tensors)
    wrong = [f"engine {engine}: {count}" for engine, count in enumerate(applied) if count != sent]
    if wrong:
        raise RuntimeError(f"{sent} tensors were sent for weight version {plan.version}, applied by {', '.join(wrong)}")


def _check_equal(trainers: WorkerGroup, engines: WorkerGroup) -> None:
    """The SHA-256 of every tensor, trainer against each engine."""
    handles = engines.start("weight_checksums")
    published = trainers.call("weight_checksums")[0]
    for engine, held in enumerate(engines.wait(handles)):
        compare_checksums(published, held, f"engine {engine}")


def _give_up(engines: WorkerGroup, error: BaseException) -> None:
    """Abort the update on every engine and let it take requests again; one that can't be reached is noted."""
    for engine in range(engines.size):
        for verb in ("abort_update", "resume"):
            try:
                engines.wait(engines.start(verb, workers=[engine]))
            except Exception as second:
                error.add_note(f"{verb} failed on engine {engine} as well: {type(second).__name__}: {second}")
