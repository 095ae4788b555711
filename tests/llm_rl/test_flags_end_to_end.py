"""Flags in a whole run, in this process: what the engine is told, what an evaluation draws, which checkpoints stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import tiny_grpo
from llm_rl.presets.tiny import VOCABULARY, write_sums

EVALUATED: list[Any] = []
"""Samples of the evaluations of the running test, as the log hook saw them."""


def write_down(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:
    EVALUATED.extend(data["sums"]["samples"])
    return False


def run(folder: Path, model: Path, *flags: str) -> Path:
    """The tiny recipe with an untrained model and few samples; returns the run's directory."""
    train = write_sums(folder / "sums").train
    words = f"--in-process --hf-checkpoint {model} --prompt-data {train}@[0:16] --runs-dir {folder}/runs --run-name run"
    words += " --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --rm-type random"
    words += " --eval-target None --save-hf None --progress none"
    train_from_command_line(tiny_grpo().config, [*words.split(), *flags], recipe="flags")
    return folder / "runs" / "run"


def test_stops_and_checkpoints(tmp_path: Path, tiny_model_dir: Path) -> None:
    sentinel = tmp_path / "save_now"
    sentinel.touch()
    flags = "--rollout-stop 1 23 --num-rollout 3 --eval-prompt-data --eval-interval None --save-keep-last 1"
    flags += f" --save-interval 1 --save-trigger-sentinel {sentinel} --check-weight-update-equal"
    seven = str(VOCABULARY.index("7"))
    directory = run(tmp_path, tiny_model_dir, *flags.split(), "--rollout-stop-token-ids", seven)

    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 16
    ends = set()
    for row in rows:
        text = row["response"]
        # As written: whichever comes first is the last that was drawn.
        found = [text.find(stop) + len(stop) for stop in ("1", "23", "7") if stop in text]
        assert not found or (min(found) == len(text) and row["status"] == "completed")
        ends.add(text[-1:])
    assert {"1", "7"} <= ends

    kept = {path.name for path in (directory / "checkpoints").iterdir()}
    assert kept == {"iter_0000003", "latest_checkpointed_iteration.txt"}
    assert not sentinel.exists()


@pytest.mark.parametrize("greedy", ["--eval-temperature 0", "--eval-top-k 1", "--eval-top-p 1e-6"])
def test_evaluations_have_their_own_sampling(tmp_path: Path, tiny_model_dir: Path, greedy: str) -> None:
    """Each of these makes the draws of a prompt equal; the rollout keeps drawing at random."""
    EVALUATED.clear()
    held_out = write_sums(tmp_path / "held_out").train
    flags = f"--num-rollout 1 --eval-prompt-data sums {held_out}@[0:4] --n-samples-per-eval-prompt 3 {greedy}"
    flags += " --eval-temperature 1" if "--eval-temperature" not in greedy else ""
    flags += f" --eval-max-response-len 5 --custom-eval-rollout-log-function-path {__name__}.write_down"
    directory = run(tmp_path, tiny_model_dir, *flags.split())

    assert len(EVALUATED) == 2 * 4 * 3  # before and after
    answers: dict[tuple[int, int | None], set[tuple[int, ...]]] = {}
    for sample in EVALUATED:
        assert sample.response_length <= 5
        key = (sample.group_index, sample.weight_version_returned)
        answers.setdefault(key, set()).add(tuple(sample.tokens[sample.prompt_length :]))
    assert len(answers) == 2 * 4
    assert all(len(drawn) == 1 for drawn in answers.values())

    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert len({row["response"] for row in rows}) > 8
