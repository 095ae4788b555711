"""On-policy distillation on a language model.

    uv run scripts/run_llm_opd.py                            a tiny model learns sums from a teacher, without rewards
    uv run scripts/run_llm_opd.py --opd-log-prob-top-k 8     whole distributions instead of sampled tokens
    uv run scripts/run_llm_opd.py --opd-type sglang --opd-teacher-load None --rm-url http://host:30000/generate

The first run trains the teacher, in minutes on two CPU cores. Every flag of `llm-rl train --help` can follow.
`--no-cache` makes models and data anew.
"""

import argparse

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import tiny_opd


def main() -> None:
    """Take the preset; the flags go to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = tiny_opd()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
