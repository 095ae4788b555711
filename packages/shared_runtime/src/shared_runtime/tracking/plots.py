"""reward.png, and loss.png of runs without rewards: the curves of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared_runtime.tracking.jsonl import read_rows
from shared_runtime.tracking.keys import REWARD, eval_scores, first_of
from shared_runtime.tracking.sink import Sink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Corner = Literal["lower right", "upper right"]

_REWARD_COLOUR = "#2a6fb0"
_EVAL_COLOURS = ("#d1495b", "#2e8b57", "#8e5ea2", "#c98a1b")


@dataclass
class Curves:
    """What a run's rows say, over the number of steps done: 0 is before training."""

    reward: list[tuple[int, float]] = field(default_factory=list)
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    loss: list[tuple[int, float]] = field(default_factory=list)


class RewardPlot(Sink):
    """Draws `reward.png` when the run ends, whatever its end; without rewards, as in supervised runs, `loss.png` too.

    Args:
        metrics_path: The run's metrics.jsonl, rows of earlier starts of the run included.
        path: The picture.
        title: Stands above it, usually the run's name.
        score_label: What an evaluation score is.
    """

    name = "reward_plot"

    def __init__(self, metrics_path: Path, path: Path, title: str = "", score_label: str = "accuracy") -> None:
        self._metrics_path = metrics_path
        self._path = path
        self._title = title
        self._score_label = score_label

    def close(self) -> None:
        """Draw, unless nothing was logged."""
        if self._metrics_path.exists():
            curves = read_curves(read_rows(self._metrics_path))
            if curves.reward or curves.scores:
                plot_curves(curves, self._path, self._title, self._score_label)
            if curves.loss and not curves.reward:
                plot_loss(curves.loss, self._path.with_name("loss.png"), self._title)


def read_curves(rows: Iterable[Mapping[str, Any]]) -> Curves:
    """Reward, loss and evaluation scores of each step, from rows of metrics.jsonl."""
    curves = Curves()
    for row in rows:
        reward = first_of(row, REWARD)
        if reward is not None:
            curves.reward.append((row["step"] + 1, reward))
        if "train/loss" in row:
            curves.loss.append((row["step"] + 1, row["train/loss"]))
        for name, score in eval_scores(row).items():
            curves.scores.setdefault(name, []).append((row["step"] + 1, score))
    return curves


def smooth(values: list[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average with the bias of its start taken out, as in Adam.

    Args:
        values: One a step.
        weight: Of the past, in [0, 1); 0 returns the values.
    """
    average, mass, smoothed = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(average / mass)
    return smoothed


def plot_curves(curves: Curves, path: Path, title: str = "", score_label: str = "accuracy") -> None:
    """Draw the reward of every step, its smoothed course, and the evaluation scores, first and last with their values.

    Drawn with the Agg canvas directly: no display is needed and the caller's matplotlib backend stays as it is.
    """
    figure, axes = _figure()
    if curves.reward:
        _plot_smoothed(axes, curves.reward, "reward per step, smoothed")
    for number, (name, points) in enumerate(curves.scores.items()):
        colour = _EVAL_COLOURS[number % len(_EVAL_COLOURS)]
        steps, values = zip(*points, strict=True)
        axes.plot(
            steps, values, "o-", color=colour, linewidth=1.2, markersize=5, label=f"{score_label} on {name}, held out"
        )
        _annotate(axes, points, colour)
    everything = [v for _, v in curves.reward] + [v for points in curves.scores.values() for _, v in points]
    _decorate(axes, everything, title, f"reward, {score_label}" if curves.scores else "reward")
    _save(figure, path)


def plot_loss(loss: list[tuple[int, float]], path: Path, title: str = "") -> None:
    """Draw the loss of every step and its smoothed course."""
    figure, axes = _figure()
    _plot_smoothed(axes, loss, "loss per step, smoothed")
    _decorate(axes, [], title, "loss", legend="upper right")
    _save(figure, path)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _plot_smoothed(axes: Axes, points: list[tuple[int, float]], label: str) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=_REWARD_COLOUR, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(list(values)), color=_REWARD_COLOUR, linewidth=2, label=label)


def _annotate(axes: Axes, points: list[tuple[int, float]], colour: str) -> None:
    """Write the first and the last score under their points, or above where there is no room below."""
    ends = {"before": points[0], "after": points[-1]} if len(points) > 1 else {"": points[0]}
    for word, (step, value) in ends.items():
        score = f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"
        axes.annotate(
            f"{word} {score}".strip(),
            (step, value),
            xytext=(0, 9 if 0 <= value < 0.08 else -16),
            textcoords="offset points",
            ha="right" if word == "after" else "left",
            color=colour,
            fontsize=10,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _decorate(axes: Axes, everything: list[float], title: str, y_label: str, legend: Corner = "lower right") -> None:
    from matplotlib.ticker import MaxNLocator

    if everything and min(everything) >= 0 and max(everything) <= 1:
        axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc=legend)
