"""One run from a configuration to its results: check, start the workers, loop, export."""

from __future__ import annotations

from collections.abc import Callable

from llm_rl.config import TrainConfig, resolve
from llm_rl.domain import LlmDomain
from llm_rl.preflight import preflight
from llm_rl.workers import open_workers, trainer_settings
from shared_runtime import run as runs
from shared_runtime.run import RunParts, TrainResult

__all__ = ["TrainResult", "run_from_command_line", "train"]


def train(config: TrainConfig, *, recipe: str = "llm-rl") -> TrainResult:
    """Run a configuration to its end, resuming it where it was stopped.

    Args:
        config: The run; need not be resolved.
        recipe: Name of the run's directory when `run_name` is not set.

    Raises:
        ConfigError: If it can't work; nothing has been started then.
        RunDirectoryError: If the directory is another run's.
    """
    prepared = preflight(resolve(config))
    config = prepared.config
    steps = (config.batch.num_rollout or 1) * (config.batch.num_steps_per_rollout or 1)
    settings = trainer_settings(config, prepared.hooks, steps)
    parts = RunParts(
        workers=lambda logs: open_workers(config, settings, logs),
        domain=lambda workers, directory: LlmDomain(prepared, workers, dp_size=config.world_size),
        update_weights_interval=config.model.update_weights_interval,
    )
    return runs.run(config, parts, recipe=recipe)


def run_from_command_line(
    config: TrainConfig, *, recipe: str, dry_run: bool = False, prepare: Callable[[], None] | None = None
) -> None:
    """Prepare, check, train, and say where the results are. Ends the process with a message where that can't work."""
    runs.run_from_command_line(
        check=lambda: runs.check_directory(preflight(resolve(config)).config),
        train=lambda: train(config, recipe=recipe),
        dry_run=dry_run,
        prepare=prepare,
    )
