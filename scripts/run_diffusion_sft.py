"""Supervised fine-tuning of a diffusion model on captioned pictures.

    uv run scripts/run_diffusion_sft.py               a tiny SD3 learns to draw coloured shapes
    uv run scripts/run_diffusion_sft.py --in-process  the same without Ray
    uv run scripts/run_diffusion_sft.py --prompt-data mine.jsonl --input-key prompt --label-key picture

Every flag of `diffusion-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

import argparse

from diffusion_rl.cli import train_from_command_line
from diffusion_rl.presets.recipes import SFT_PRESETS


def main() -> None:
    """Pick the preset, then hand the remaining flags to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=sorted(SFT_PRESETS), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = SFT_PRESETS[ours.preset]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
