"""Flow-GRPO on a diffusion model.

    uv run scripts/run_diffusion_grpo.py               a tiny SD3 learns to draw what its prompts say
    uv run scripts/run_diffusion_grpo.py --in-process  the same without Ray
    uv run scripts/run_diffusion_grpo.py --lr 2e-4 --num-rollout 40 --run-name mine

Every flag of `diffusion-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

import argparse

from diffusion_rl.cli import train_from_command_line
from diffusion_rl.presets.recipes import GRPO_PRESETS


def main() -> None:
    """Pick the preset, then hand the remaining flags to the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=sorted(GRPO_PRESETS), default="tiny")
    parser.add_argument("--no-cache", action="store_true")
    ours, flags = parser.parse_known_args()
    preset = GRPO_PRESETS[ours.preset]()
    train_from_command_line(
        preset.config,
        flags,
        recipe=preset.name,
        description=__doc__,
        prepare=lambda: preset.prepare(ours.no_cache),
    )


if __name__ == "__main__":
    main()
