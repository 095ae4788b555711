"""Supervised fine-tuning of a language model.

    uv run scripts/run_llm_sft.py               a tiny model learns sums from drawn weights
    uv run scripts/run_llm_sft.py --in-process  the same without Ray
    uv run llm-rl train --loss-type sft_loss --hf-checkpoint MODEL --prompt-data chats.jsonl --input-key messages \\
        --rollout-batch-size 64                 your own model and conversations

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

import argparse

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import SFT_PRESETS


def main() -> None:
    """Pick the preset, then hand the remaining flags to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=sorted(SFT_PRESETS), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = SFT_PRESETS[ours.model]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
