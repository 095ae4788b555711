"""Direct preference optimisation of a language model.

    uv run scripts/run_llm_dpo.py               a tiny model learns to prefer right sums to its own wrong ones
    uv run scripts/run_llm_dpo.py --in-process  the same without Ray
    uv run llm-rl train --loss-type dpo_loss --hf-checkpoint MODEL --prompt-data pairs.jsonl --input-key prompt \\
        --rollout-batch-size 64                 your own model and rows of prompt, chosen and rejected

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

import argparse

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import DPO_PRESETS


def main() -> None:
    """Pick the preset, then hand the remaining flags to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=sorted(DPO_PRESETS), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = DPO_PRESETS[ours.model]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
