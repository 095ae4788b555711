"""The tracker of a run, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_runtime.tracking.console import ConsoleSink
from shared_runtime.tracking.jsonl import JsonlSink
from shared_runtime.tracking.plots import RewardPlot
from shared_runtime.tracking.run_dir import RunDirectory
from shared_runtime.tracking.sink import Sink
from shared_runtime.tracking.tracker import Tracker

if TYPE_CHECKING:
    from shared_runtime.tracking.wandb import Mode


def build_tracker(
    run: RunDirectory,
    total_steps: int,
    *,
    config: Mapping[str, Any] | None = None,
    log_interval: int = 1,
    score_label: str = "accuracy",
    console: bool = True,
    use_wandb: bool = False,
    wandb_project: str | None = None,
    wandb_group: str | None = None,
    wandb_team: str | None = None,
    wandb_host: str | None = None,
    wandb_key: str | None = None,
    wandb_mode: Mode | None = None,
    wandb_dir: Path | None = None,
    tensorboard_dir: Path | None = None,
) -> Tracker:
    """JSONL and `reward.png` always; console, W&B and TensorBoard as asked for.

    On resume call `tracker.truncate_after(last rollout in the checkpoint)` before the first `log`.

    Raises:
        ImportError: If a sink's package is missing; names the extra.
    """
    sinks: list[Sink] = [JsonlSink(run.metrics_path, run.samples_path)]
    if console:
        sinks.append(ConsoleSink(total_steps, run.name, log_interval, score_label))
    if tensorboard_dir:
        from shared_runtime.tracking.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(tensorboard_dir / run.name))
    if use_wandb:
        from shared_runtime.tracking.wandb import WandbSink

        sinks.append(
            WandbSink(
                run.wandb_state_path,
                wandb_project or "tandem",
                group=wandb_group,
                name=run.name,
                team=wandb_team,
                host=wandb_host,
                mode=wandb_mode,
                directory=wandb_dir or run.path,
                config=config,
                api_key=wandb_key,
            )
        )
    sinks.append(RewardPlot(run.metrics_path, run.reward_plot_path, run.name, score_label))
    return Tracker(sinks)
