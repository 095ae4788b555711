"""Every algorithm of docs/algorithms.md on the tiny preset: three seeds each, a table and a picture of the curves.

    uv run benchmarks/algorithms.py [--rollouts 100 --seeds 1 2 3 --only grpo ppo --write-docs]

Runs follow one another in this process and take a minute each. A finished one leaves a file in `--results`, and is not
run again unless its flags have changed. Accuracy is that of greedy answers to 500 held-out sums after the last rollout;
cost is CPU time a rollout, evaluation included. `--write-docs` puts table and picture where the documentation has them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import _common  # noqa: F401

from llm_rl.config import TrainConfig, resolve
from llm_rl.presets.recipes import Preset, tiny_dpo, tiny_grpo, tiny_opd, tiny_sft
from llm_rl.train import train
from shared_runtime.cli import parse
from shared_runtime.tracking.jsonl import read_rows
from shared_runtime.tracking.plots import read_curves

DOCS = Path(__file__).resolve().parents[1] / "docs"
GOAL = 1.5
LAG = "--update-weights-interval 5"
MIS = "llm_rl.algorithms.mis.mis_correction"


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    Attributes:
        name: In the table, the picture and the names of files.
        formula: What tells it from the others.
        paper: Its number on arXiv.
        flags: On top of the preset's.
        preset: Where it starts.
        rollouts: Unless `--rollouts`.
    """

    name: str
    formula: str
    paper: str
    flags: str = ""
    preset: Callable[[], Preset] = tiny_grpo
    rollouts: int | None = None


ESTIMATORS = (
    Algorithm("grpo", "A = (r − mean)/(std + 1e-6), clipped ratio of a token", "2402.03300"),
    Algorithm(
        "gspo",
        "the same A, clipped ratio of a response",
        "2507.18071",
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
    ),
    Algorithm("cispo", "the same A, −sg(clip ρ)·A·log π", "2506.13585", "--advantage-estimator cispo"),
    Algorithm("rloo", "A = r − mean of the others", "2402.14740", "--advantage-estimator rloo"),
    Algorithm(
        "reinforce_plus_plus_baseline",
        "A = whitened r − mean",
        "2501.03262",
        "--advantage-estimator reinforce_plus_plus_baseline",
    ),
    Algorithm("reinforce_plus_plus", "A = whitened G_t", "2501.03262", "--advantage-estimator reinforce_plus_plus"),
    Algorithm(
        "ppo",
        "A = GAE of a critic's values",
        "1707.06347",
        "--advantage-estimator ppo --normalize-advantages --critic-lr 1e-3 --num-critic-only-steps 5",
    ),
)
OTHERS = (
    Algorithm("opd", "A = −(log π_S − log π_T), no rewards", "2604.13016", preset=tiny_opd),
    Algorithm("sft", "−log π of the labels, from drawn weights", "", preset=tiny_sft),
    Algorithm("dpo", "−log σ(β·h) on pairs drawn once", "2305.18290", preset=tiny_dpo, rollouts=12),
)
OFF_POLICY = (
    Algorithm("lag, none", "ρ = π_θ/π_rollout, clipped", "1707.06347", LAG),
    Algorithm("lag, TIS", "w = min(π_old/π_rollout, 2)", "2402.03300", f"{LAG} --use-tis"),
    Algorithm(
        "lag, MIS",
        "w = π_old/π_rollout in [0.5, 2], else rejected",
        "2402.03300",
        f"{LAG} --use-tis --use-rs --custom-tis-function-path {MIS} --tis-lower-bound 0.5",
    ),
)
GROUPS = {"estimators": ESTIMATORS, "other objectives": OTHERS, "rollouts that lag": OFF_POLICY}
ALL = [algorithm for group in GROUPS.values() for algorithm in group]


@dataclass(frozen=True)
class Run:
    """What is kept of a run.

    Attributes:
        flags: What it was started with.
        cpu_seconds: Of one rollout, with its training and its share of the evaluations.
        scores: (rollouts done, accuracy) of the held-out sums.
    """

    flags: list[str]
    cpu_seconds: float
    scores: list[list[float]]

    @property
    def accuracy(self) -> float:
        """After the last rollout."""
        return self.scores[-1][1]


def flags_of(algorithm: Algorithm, seed: int, rollouts: int) -> list[str]:
    """Command-line words of one run."""
    own = f"--num-rollout {algorithm.rollouts or rollouts} --seed {seed} --rollout-seed {seed}"
    short = "--in-process --save-interval None --save-hf None --eval-target None --progress none"
    return f"{algorithm.flags} {own} {short}".split()


def measure(algorithm: Algorithm, flags: list[str]) -> Run:
    """Run it in this process."""
    preset = algorithm.preset()
    preset.prepare(False)
    with tempfile.TemporaryDirectory() as runs:
        config: TrainConfig = parse(preset.config, [*flags, "--runs-dir", runs], check=resolve).config
        began = time.process_time()
        train(config, recipe="run")
        seconds = time.process_time() - began
        curves = read_curves(read_rows(Path(runs) / "run" / "metrics.jsonl"))
    scores = [[float(step), score] for step, score in curves.scores["sums"]]
    return Run(flags, seconds / scores[-1][0], scores)


def measured(algorithm: Algorithm, seed: int, rollouts: int, results: Path) -> Run:
    """The run of an earlier start of this benchmark, or a new one."""
    path = results / f"{algorithm.name.replace(', ', '-')}-{seed}.json"
    flags = flags_of(algorithm, seed, rollouts)
    if path.is_file():
        run = Run(**json.loads(path.read_text()))
        if run.flags == flags:
            return run
    run = measure(algorithm, flags)
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(run)))
    print(f"{algorithm.name}, seed {seed}: {run.accuracy:.1%}, {run.cpu_seconds:.2f} CPU-seconds a rollout", flush=True)
    return run


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown, a row an algorithm."""
    lines = [
        "| | formula | paper | flags | rollouts | CPU-s a rollout | accuracy |",
        "| - | - | - | - | - | - | - |",
    ]
    for algorithm in ALL:
        if algorithm.name in runs:
            found = runs[algorithm.name]
            link = f"[{algorithm.paper}](https://arxiv.org/abs/{algorithm.paper})" if algorithm.paper else ""
            flags = f"`{algorithm.flags}`" if algorithm.flags else ""
            cost = statistics.median(run.cpu_seconds for run in found)
            lines.append(
                f"| {algorithm.name} | {algorithm.formula} | {link} | {flags} | {found[0].scores[-1][0]:.0f} | "
                f"{cost:.2f} | {summary([run.accuracy for run in found])} |"
            )
    return "\n".join(lines)


def summary(accuracies: list[float]) -> str:
    """Mean and standard deviation over the seeds, in per cent."""
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return f"{100 * statistics.fmean(accuracies):.1f} ± {100 * spread:.1f} %"


def plot(runs: dict[str, list[Run]], path: Path) -> None:
    """Mean accuracy over the rollouts, and the range of the seeds, a panel for each kind of algorithm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(GROUPS), sharey=True)
    for axes, (title, group) in zip(panels, GROUPS.items(), strict=True):
        for algorithm in group:
            found = runs.get(algorithm.name, [])
            if found:
                steps = [step for step, _ in found[0].scores]
                by_step = list(zip(*([score for _, score in run.scores] for run in found), strict=True))
                (line,) = axes.plot(steps, [statistics.fmean(x) for x in by_step], label=algorithm.name, linewidth=1.6)
                low, high = [min(x) for x in by_step], [max(x) for x in by_step]
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(xlabel="rollouts", title=title, ylim=(0, 1.02))
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    panels[0].set_ylabel("accuracy on held-out sums")
    figure.savefig(path)


def write_docs(text: str, page: Path) -> None:
    """Put the table between the marks that name this benchmark.

    Raises:
        ValueError: If the page has no such marks.
    """
    begin, end = "<!-- benchmarks/algorithms.py -->\n", "\n<!-- end -->"
    before, marked, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (marked and closed):
        raise ValueError(f"{page} has no marks for the table")
    page.write_text(before + begin + text + end + after)


def main() -> None:
    """Run what is missing, print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=[a.name for a in ALL], metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--write-docs", action="store_true")
    settings = parser.parse_args()
    chosen = [a for a in ALL if settings.only is None or a.name in settings.only]
    runs: dict[str, list[Run]] = {a.name: [] for a in chosen}
    for seed in settings.seeds:
        for algorithm in chosen:
            runs[algorithm.name].append(measured(algorithm, seed, settings.rollouts, settings.results))
    print(table(runs))
    settings.results.mkdir(parents=True, exist_ok=True)
    picture = DOCS / "images" / "algorithms.png" if settings.write_docs else settings.results / "algorithms.png"
    plot(runs, picture)
    if settings.write_docs:
        write_docs(table(runs), DOCS / "algorithms.md")
    estimators = [a.name for a in ESTIMATORS if a.name in runs]
    gains = {n: statistics.fmean(run.accuracy / run.scores[0][1] for run in runs[n]) for n in estimators}
    report = {
        "benchmark": "algorithms",
        "ratio": round(min(gains.values()), 3) if gains else None,
        "goal": GOAL,
        "runs": [{"algorithm": n, "accuracies": [run.accuracy for run in found]} for n, found in runs.items()],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
