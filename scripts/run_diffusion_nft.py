"""DiffusionNFT on a diffusion model.

    uv run scripts/run_diffusion_nft.py               a tiny SD3 learns to draw what its prompts say
    uv run scripts/run_diffusion_nft.py --in-process  the same without Ray
    uv run scripts/run_diffusion_nft.py --lr 2e-4 --num-rollout 40 --run-name mine

Every flag of `diffusion-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

from diffusion_rl.cli import train_from_command_line
from diffusion_rl.presets.recipes import NFT_PRESETS
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe(NFT_PRESETS, train_from_command_line, __doc__)
