"""GRPO on a language model.

    uv run scripts/run_llm_grpo.py                        a tiny model learns sums, in minutes on two CPU cores
    uv run scripts/run_llm_grpo.py --model smollm2-135m   a real chat model, through its chat template
    uv run scripts/run_llm_grpo.py --lr 1e-4 --num-rollout 40 --run-name mine

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

import argparse

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import PRESETS


def main() -> None:
    """Pick the preset, then hand the remaining flags to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = PRESETS[ours.model]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
