"""One run from a configuration to its results: check, start the workers, loop, export, draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffusion_rl.config import TrainConfig, resolve
from diffusion_rl.domain import DiffusionDomain
from diffusion_rl.media import GRID, draw_before_after
from diffusion_rl.preflight import preflight
from diffusion_rl.workers import open_workers, trainer_settings
from shared_runtime import run as runs
from shared_runtime.run import RunParts, TrainResult

__all__ = ["TrainResult", "run_from_command_line", "train"]


def train(config: TrainConfig, *, recipe: str = "diffusion-rl") -> TrainResult:
    """Run a configuration to its end, resuming it where it was stopped.

    Args:
        config: The run; need not be resolved.
        recipe: Name of the run's directory when `run_name` is not set.

    Raises:
        ConfigError: If it can't work; nothing has been started then.
        RunDirectoryError: If the directory is another run's.
    """
    prepared = preflight(resolve(config))
    config, family = prepared.config, prepared.family
    steps = (config.batch.num_rollout or 1) * (config.batch.num_steps_per_rollout or 1)
    settings = trainer_settings(config, family, prepared.hooks, steps)
    parts = RunParts(
        workers=lambda logs: open_workers(config, family, settings, logs),
        domain=lambda workers, directory: DiffusionDomain(prepared, workers, directory / "media"),
        finish=_draw,
        score_label="held-out reward",
    )
    return runs.run(config, parts, recipe=recipe)


def _draw(directory: Path) -> None:
    draw_before_after(directory / "media", directory / GRID)


def run_from_command_line(
    config: TrainConfig, *, recipe: str, dry_run: bool = False, prepare: Callable[[], None] | None = None
) -> None:
    """Prepare, check, train, and say where the results are. Ends the process with a message where that can't work."""
    from diffusers.utils import logging

    logging.disable_progress_bar()  # the run has its own display
    runs.run_from_command_line(
        check=lambda: runs.check_directory(preflight(resolve(config)).config),
        train=lambda: train(config, recipe=recipe),
        dry_run=dry_run,
        prepare=prepare,
        more_lines=_pictures,
    )


def _pictures(result: TrainResult) -> list[str]:
    grid = result.directory / GRID
    return [f"pictures {grid}"] if grid.is_file() else []
