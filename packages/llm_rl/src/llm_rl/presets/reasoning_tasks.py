"""Procedural tasks of the `reasoning-gym` package as prompt files, and their own scoring as a reward."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

from llm_rl.sample import Sample


def write_prompts(path: Path, task: str, *, size: int, seed: int, prefill: bool = False, **options: Any) -> None:
    """Write `size` entries of a task as JSONL rows with `messages`, `label` and `metadata`.

    Args:
        path: File to write.
        task: Name of a reasoning-gym data set, such as `chain_sum`.
        size: Number of rows.
        seed: Seed of the data set.
        prefill: Open the assistant's turn with the task's expression (for small models that chat instead of answering).
        options: The data set's own settings.

    Raises:
        ImportError: If the `tasks` extra is missing.
    """
    with path.open("w") as file:
        for entry in _gym().create_dataset(task, size=size, seed=seed, **options):
            messages = [{"role": "user", "content": entry["question"]}]
            if prefill:
                messages.append({"role": "assistant", "content": f"{entry['metadata']['expression']} ="})
            row = {"messages": messages, "label": entry["answer"], "metadata": {"entry": entry}}
            file.write(json.dumps(row) + "\n")


def reward(args: Any, sample: Sample) -> float:
    """The task's own score of the answer in a response, in [0, 1]: a `--custom-rm-path` hook."""
    entry = sample.metadata["entry"]
    score = _gym().get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score(extract_answer(sample.response), entry))


def extract_answer(response: str) -> str:
    """The answer in a response: `<answer>…</answer>` if there is one, else the first line without a final full stop."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    lines = response.strip().splitlines()
    return lines[0].strip().removesuffix(".").strip() if lines else ""


def _gym() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from packages that reasoning-gym imports
            import reasoning_gym
    except ImportError as error:
        raise ImportError("reasoning-gym is missing: install the extra tandem-llm-rl[tasks]") from error
    return reasoning_gym
