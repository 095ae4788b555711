"""The console: a live display in a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from shared_runtime.tracking.keys import REWARD, eval_scores, first_of
from shared_runtime.tracking.sink import Metrics, Sink

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

PHASES = {
    "rollout": "generate",
    "reward": "score",
    "actor_train": "train",
    "update_weights": "publish",
    "eval": "evaluate",
    "save": "save",
}
_TIMES = ("rollout", "reward", "actor_train", "update_weights")
_SPARKS = "▁▂▃▄▅▆▇█"
_WINDOW = 10  # steps that the time left is estimated from


class ConsoleSink(Sink):
    """Progress for the person who watches.

    Args:
        total_steps: Number of rollouts of the run; steps count from 0.
        title: The run's name.
        score_label: What an evaluation score is.
        log_interval: In plain mode, print every that many steps, and the last one.
        live: Live display or plain lines; `None` is live on a terminal.
        console: Where to; the default is standard output.
        clock: Seconds, monotonic.
    """

    name = "console"

    def __init__(
        self,
        total_steps: int,
        title: str = "",
        log_interval: int = 1,
        live: bool | None = None,
        score_label: str = "accuracy",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total = total_steps
        self._title = title
        self._score_label = score_label
        self._interval = max(1, log_interval)
        self._clock = clock
        self._wanted_live = live
        self._live: Live | None = None
        self._step = -1
        self._phase: str | None = None
        self._metrics: dict[str, float | None] = {}
        self._rewards: list[float] = []
        self._first_scores: dict[str, float] = {}
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        """Show the step; a row with evaluation results only is shown too."""
        new_scores = eval_scores(metrics)
        self._first_scores = {**new_scores, **self._first_scores}
        self._metrics.update(metrics)
        reward = first_of(metrics, REWARD)
        is_step = reward is not None or "train/loss" in metrics
        if reward is not None:
            self._rewards.append(reward)
        if is_step:
            self._step = step
            self._ends.append((step, self._clock()))
        if self._is_live():
            self._refresh()
        elif not is_step:
            where = self._position(step) if self._step >= 0 else "before training"
            for name, score in new_scores.items():
                self._print(f"{where} | {self._score_label} ({name}) {_number(score)}")
        elif (step + 1) % self._interval == 0 or step + 1 == self._total:
            self._print(self._line())

    def phase(self, name: str | None) -> None:
        """Show what the run is doing (terminal only)."""
        self._phase = name
        if self._is_live():
            self._refresh()

    def truncate_after(self, step: int) -> None:
        """Begin to count behind `step`."""
        self._step = max(step, -1)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live:
            self._phase = None
            self._live.update(self._panel(), refresh=True)
            self._live.stop()
            self._live = None

    def seconds_left(self) -> float | None:
        """Estimate from the last steps of this process; `None` before there are two."""
        if len(self._ends) < 2:
            return None
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        return (end - start) / (last - first) * max(0, self._total - 1 - self._step)

    def _screen(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=sys.stdout)
        return self._console

    def _is_live(self) -> bool:
        if self._wanted_live is not None:
            return self._wanted_live
        screen = self._screen()
        return screen.is_terminal and not screen.is_dumb_terminal and not screen.is_jupyter

    def _print(self, line: str) -> None:
        self._screen().print(line, highlight=False, markup=False, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is None:
            from rich.live import Live

            # Redirection lets log lines of other parts pass above the display instead of through it.
            self._live = Live(console=self._screen(), get_renderable=self._panel, refresh_per_second=4)
            self._live.start()

    def _position(self, step: int) -> str:
        return f"step {step + 1}/{self._total}"

    def _line(self) -> str:
        parts = [self._position(self._step)]
        parts += [f"{label} {text}" for label, text in self._facts()]
        times = self._times()
        if times:
            parts.append(" ".join(f"{label} {text}" for label, text in times))
        left = self.seconds_left()
        if left is not None:
            parts.append(f"left {_duration(left)}")
        return " | ".join(parts)

    def _facts(self) -> list[tuple[str, str]]:
        reward = first_of(self._metrics, REWARD)
        facts = [] if reward is None else [("reward", _number(reward))]
        scores = eval_scores(self._metrics)
        facts += [(self._score_name(name, len(scores)), _number(score)) for name, score in scores.items()]
        for key, label in (("train/loss", "loss"), ("train/grad_norm", "grad norm")):
            if key in self._metrics:
                facts.append((label, _number(self._metrics[key])))
        rate = self._metrics.get("perf/tokens_per_s")
        if rate is not None:
            facts.append(("tokens/s", f"{rate:,.0f}"))
        return facts

    def _times(self) -> list[tuple[str, str]]:
        times = [(PHASES[name], self._metrics.get(f"perf/{name}_time")) for name in _TIMES]
        times.append(("step", self._metrics.get("perf/step_time")))
        return [(label, f"{seconds:.2f}s") for label, seconds in times if seconds is not None]

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = self._step + 1
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, width=10)
        top.add_column(no_wrap=True, justify="right")
        left = self.seconds_left()
        top.add_row(
            Text(f"step {done}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=done),
            Text(PHASES.get(self._phase, self._phase) if self._phase else "", style="cyan"),
            Text(f"left {_duration(left)}" if left is not None else "", style="dim"),
        )
        facts = Table.grid(padding=(0, 2))
        rest = []
        befores = self._befores()
        for label, text in self._facts():
            if label == "reward":
                row = Text(text, style="bold")
                row.append("  " + sparkline(self._rewards), style="green")
                facts.add_row(Text(label, style="dim"), row)
            elif label in befores:
                row = Text(text, style="bold")
                row.append(befores[label], style="not bold dim")
                facts.add_row(Text(label, style="dim"), row)
            else:
                rest.append(f"{label} [bold]{text}[/bold]")
        numbers = Text.from_markup("   ".join(rest))
        times = Text("   ".join(f"{label} {text}" for label, text in self._times()), style="dim")
        return Panel(
            Group(top, facts, numbers, times), title=self._title or None, title_align="left", border_style="dim"
        )

    def _befores(self) -> dict[str, str]:
        """For each score shown, where it came from."""
        scores = eval_scores(self._metrics)
        texts = {}
        for name, score in scores.items():
            before = self._first_scores[name]
            texts[self._score_name(name, len(scores))] = "" if before == score else f"  from {_number(before)}"
        return texts

    def _score_name(self, name: str, count: int) -> str:
        return self._score_label if count == 1 else f"{self._score_label} ({name})"


def sparkline(values: list[float], width: int = 40) -> str:
    """A line of block characters, the newest value at the right; more than `width` values are averaged in bins."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def _number(value: float | None) -> str:
    if value is None:
        return "nan"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
