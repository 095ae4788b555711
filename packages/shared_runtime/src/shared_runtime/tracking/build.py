"""The tracker of a run, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared_runtime.tracking.console import ConsoleSink
from shared_runtime.tracking.grids import GridSink
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
    progress: Literal["auto", "live", "plain", "none"] = "auto",
    use_wandb: bool = False,
    wandb_project: str | None = None,
    wandb_group: str | None = None,
    wandb_team: str | None = None,
    wandb_host: str | None = None,
    wandb_run_id: str | None = None,
    wandb_mode: Mode | None = None,
    wandb_dir: Path | None = None,
    use_tensorboard: bool = False,
    tensorboard_dir: Path | None = None,
) -> Tracker:
    """JSONL, grids of logged pictures and `reward.png` always; console, W&B and TensorBoard as asked for.

    On resume call `tracker.truncate_after(last rollout in the checkpoint)` before the first `log`.

    Args:
        run: The run's directory.
        total_steps: Rollouts in the whole run.
        config: The resolved configuration, for W&B; secrets are left out.
        log_interval: `--log-interval`.
        score_label: What an evaluation score is, in console and picture.
        progress: Live display, plain lines, or nothing; `auto` is live on a terminal.
        use_wandb: `--use-wandb`; the other `wandb_…` are those of `WandbSink`.
        use_tensorboard: `--use-tensorboard`.
        tensorboard_dir: A directory that several runs share, each in a folder of its name; without it the run's own.

    Raises:
        ImportError: If a sink's package is missing; names the extra.
    """
    sinks: list[Sink] = [JsonlSink(run.metrics_path, run.samples_path), GridSink(run.media_path)]
    if progress != "none":
        live = None if progress == "auto" else progress == "live"
        sinks.append(ConsoleSink(total_steps, run.name, log_interval, live, score_label))
    if use_tensorboard or tensorboard_dir:
        from shared_runtime.tracking.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(tensorboard_dir / run.name if tensorboard_dir else run.path / "tensorboard"))
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
                run_id=wandb_run_id,
            )
        )
    sinks.append(RewardPlot(run.metrics_path, run.reward_plot_path, run.name, score_label))
    return Tracker(sinks)
