"""Several runs in one picture: reward of every step, smoothed, and held-out score, a colour a run.

    uv run scripts/tools/plot_runs.py curves.png runs/seed-42 runs/seed-43 runs/seed-44

A run's name in the legend is that of its directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shared_runtime.tracking.jsonl import read_rows
from shared_runtime.tracking.plots import Curves, read_curves, smooth


def plot_runs(runs: dict[str, Curves], path: Path) -> None:
    """Draw them side by side: rewards at the left, scores of every evaluation set at the right.

    Args:
        runs: Curves by the name that the legend gives.
        path: The picture.

    Raises:
        ValueError: For a run without a reward.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=130, layout="constrained")
    rewards, scores = figure.subplots(1, 2, sharey=True)
    for number, (name, curves) in enumerate(runs.items()):
        if not curves.reward:
            raise ValueError(f"the run {name} has no reward in its metrics.jsonl")
        colour = f"C{number}"
        steps, values = zip(*curves.reward, strict=True)
        rewards.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        rewards.plot(steps, smooth(list(values)), color=colour, linewidth=2, label=name)
        for points in curves.scores.values():
            scores.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1.2, markersize=4, label=name)
    rewards.set(xlabel="step", ylabel="reward", title="training prompts")
    scores.set(xlabel="step", title="held-out prompts")
    scores.legend(frameon=False, loc="lower right")
    for axes in (rewards, scores):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    """Draw the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs")
    arguments = parser.parse_args()
    plot_runs({run.name: read_curves(read_rows(run / "metrics.jsonl")) for run in arguments.runs}, arguments.picture)


if __name__ == "__main__":
    main()
