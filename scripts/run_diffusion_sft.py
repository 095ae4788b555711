"""Supervised fine-tuning of a diffusion model on captioned pictures.

    uv run scripts/run_diffusion_sft.py               a tiny SD3 learns to draw coloured shapes
    uv run scripts/run_diffusion_sft.py --in-process  the same without Ray
    uv run scripts/run_diffusion_sft.py --prompt-data mine.jsonl --input-key prompt --label-key picture

Every flag of `diffusion-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

from diffusion_rl.cli import train_from_command_line
from diffusion_rl.presets.recipes import SFT_PRESETS
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe(SFT_PRESETS, train_from_command_line, __doc__)
