"""One run from a configuration to its results: start the workers, loop, export. The domains bring the parts."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared_runtime.checkpoint.saver import Saver
from shared_runtime.checkpoint.store import CheckpointStore
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    OptimizerConfig,
    RunConfig,
    TrackingConfig,
    to_dict,
)
from shared_runtime.domain import Domain
from shared_runtime.loop import LoopResult, LoopSettings, TrainLoop
from shared_runtime.placement.cluster import ClusterError
from shared_runtime.placement.failures import WorkerDied
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.tracking.build import build_tracker
from shared_runtime.tracking.run_dir import RunDirectory, check_run_directory, open_run_directory
from shared_runtime.tracking.run_lock import RunDirectoryError
from shared_runtime.workers import Workers

MAY_CHANGE_ON_RESUME = (
    "tracking",
    "media",
    "reward_pool",
    "run.runs_dir",
    "run.run_name",
    "cluster.ray_address",
    "checkpoint",
)
"""Settings that don't change what a run computes, so the same run may go on with others."""


class EvalSettings(Protocol):
    """What a run reads of its domain's evaluation settings."""

    @property
    def eval_interval(self) -> int | None: ...
    @property
    def eval_target(self) -> float | None: ...
    def sets(self) -> dict[str, str]: ...


class ModelSettings(Protocol):
    """What a run reads of its domain's model settings."""

    @property
    def update_weight_buffer_size(self) -> int: ...
    @property
    def check_weight_update_equal(self) -> bool: ...


class Config(Protocol):
    """The groups of a domain's configuration that a run reads."""

    @property
    def run(self) -> RunConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def model(self) -> ModelSettings: ...
    @property
    def batch(self) -> BatchConfig: ...
    @property
    def evaluation(self) -> EvalSettings: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def tracking(self) -> TrackingConfig: ...


class ClosableDomain(Domain, Protocol):
    """A domain with something to end."""

    def close(self) -> None:
        """End threads and the like."""


@dataclass(frozen=True)
class RunParts:
    """What a domain brings to a run.

    Attributes:
        workers: Opens the workers; the argument is the directory of their logs.
        domain: Builds the domain on the workers, in the run's directory.
        finish: Called after the loop, with the run's directory, before it counts as finished.
        update_weights_interval: Rollouts between weight updates.
        score_label: What an evaluation score is, in console and picture.
    """

    workers: Callable[[Path], contextlib.AbstractContextManager[Workers]]
    domain: Callable[[Workers, Path], ClosableDomain]
    finish: Callable[[Path], None] | None = None
    update_weights_interval: int = 1
    score_label: str = "accuracy"


@dataclass(frozen=True)
class TrainResult:
    """Where a run is and how it went; `hf` is the exported model."""

    directory: Path
    loop: LoopResult
    hf: Path | None

    @property
    def metrics_path(self) -> Path:
        """One object a line."""
        return self.directory / "metrics.jsonl"


def run(config: Config, parts: RunParts, *, recipe: str) -> TrainResult:
    """Run a checked configuration to its end, resuming it where it was stopped.

    Args:
        config: With every derived value filled in.
        parts: The domain's.
        recipe: Name of the run's directory when `run_name` is not set.

    Raises:
        RunDirectoryError: If the directory is another run's.
    """
    with open_run_directory(
        config.run.runs_dir,
        recipe,
        to_dict(config),
        config.run.run_name,
        ignore=_may_change(config),
        num_rollout=config.batch.num_rollout,
    ) as directory:
        return _run_in(directory, config, parts)


def check_directory(config: Config) -> None:
    """Find out whether the run may have its directory, without making it.

    Raises:
        RunDirectoryError: If the directory is another run's.
    """
    check_run_directory(
        config.run.runs_dir,
        to_dict(config),
        config.run.run_name,
        ignore=_may_change(config),
        num_rollout=config.batch.num_rollout,
    )


def _may_change(config: Config) -> list[str]:
    """Keys that may differ between the starts of one run."""
    scheduled = config.optimizer.lr_decay_style != "constant" and config.optimizer.lr_decay_iters is None
    return [*MAY_CHANGE_ON_RESUME, *([] if scheduled else ["batch.num_rollout"])]


def _run_in(directory: RunDirectory, config: Config, parts: RunParts) -> TrainResult:
    with contextlib.ExitStack() as stack:
        tracking = config.tracking
        assert config.batch.num_rollout is not None
        tracker = stack.enter_context(
            build_tracker(
                directory,
                config.batch.num_rollout,
                config=to_dict(config),
                log_interval=tracking.log_interval,
                score_label=parts.score_label,
                progress=tracking.progress,
                use_wandb=tracking.use_wandb,
                wandb_project=tracking.wandb_project,
                wandb_group=tracking.wandb_group,
                wandb_team=tracking.wandb_team,
                wandb_run_id=tracking.wandb_run_id,
                wandb_host=tracking.wandb_host,
                wandb_mode=tracking.wandb_mode,
                wandb_dir=tracking.wandb_dir,
                use_tensorboard=tracking.use_tensorboard,
                tensorboard_dir=tracking.tensorboard_dir,
            )
        )
        workers = stack.enter_context(parts.workers(directory.path / "logs"))
        domain = parts.domain(workers, directory.path)
        stack.callback(domain.close)
        store = CheckpointStore(
            config.checkpoint.save or directory.checkpoints_path, keep_last=config.checkpoint.save_keep_last
        )
        saver = Saver(
            store,
            interval=config.checkpoint.save_interval,
            sentinel=config.checkpoint.save_trigger_sentinel,
            load=config.checkpoint.load,
            update_weights_interval=parts.update_weights_interval,
        )
        loop = TrainLoop(domain, workers.trainers, workers.engines, tracker, saver, _loop_settings(config, parts))
        result = loop.run()
        hf = _export(workers.trainers, config, directory.path)
        directory.update(result.rollouts)
    if parts.finish is not None:
        parts.finish(directory.path)
    directory.finish()
    return TrainResult(directory.path, result, hf)


def _loop_settings(config: Config, parts: RunParts) -> LoopSettings:
    cluster, evaluation = config.cluster, config.evaluation
    sets = list(evaluation.sets())
    assert config.batch.num_rollout is not None
    return LoopSettings(
        num_rollout=config.batch.num_rollout,
        eval_interval=evaluation.eval_interval,
        eval_key=f"eval/{sets[0]}" if sets else None,
        eval_target=evaluation.eval_target,
        offload_train=cluster.colocate if cluster.offload_train is None else cluster.offload_train,
        offload_rollout=cluster.colocate if cluster.offload_rollout is None else cluster.offload_rollout,
        update_weights_interval=parts.update_weights_interval,
        buffer_size=config.model.update_weight_buffer_size,
        check_equal=config.model.check_weight_update_equal,
    )


def _export(trainers: WorkerGroup | None, config: Config, directory: Path) -> Path | None:
    """Write the trained model as a Hugging Face directory; a crash leaves no half of one behind."""
    if trainers is None or config.checkpoint.save_hf is None:
        return None
    target = directory / config.checkpoint.save_hf
    staging = target.with_name(target.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    trainers.call("wake_up")
    trainers.call("save_hf", staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return target


def run_from_command_line(
    *,
    check: Callable[[], object],
    train: Callable[[], TrainResult],
    dry_run: bool = False,
    prepare: Callable[[], None] | None = None,
    more_lines: Callable[[TrainResult], Sequence[str]] = lambda result: (),
) -> None:
    """Prepare, check, train, and say where the results are. Ends the process with a message where that can't work.

    Args:
        check: Everything that can be checked before a worker starts.
        train: The run.
        dry_run: Stop after the checks.
        prepare: Makes the recipe's model and data.
        more_lines: What to say besides, at the end.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # weights load in a moment, and the run has its own display
    try:
        if prepare is not None:
            prepare()
        if dry_run:
            check()
            print("everything checked, nothing started")
            return
        result = train()
    except (ConfigError, RunDirectoryError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except WorkerDied as error:
        print(f"error: {error}\nthe same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    print("\n".join([summary(result), *more_lines(result)]))


def summary(result: TrainResult) -> str:
    """What a user wants to know at the end."""
    lines = []
    for key, after in result.loop.after.items():
        if key.startswith("eval/") and "/" not in key.removeprefix("eval/"):
            before = result.loop.before.get(key)
            start = "" if before is None else f"{before:.1%} before, "
            lines.append(f"{key.removeprefix('eval/')}: {start}{after:.1%} after {result.loop.rollouts} steps")
    lines += [f"run      {result.directory}", f"metrics  {result.metrics_path}"]
    curves = [result.directory / name for name in ("loss.png", "reward.png")]
    lines += [f"curve    {curve}" for curve in curves if curve.is_file()]
    if result.hf is not None:
        lines.append(f"model    {result.hf}")
    return "\n".join(lines)
