"""GRPO on a language model.

    uv run scripts/run_llm_grpo.py                        a tiny model learns sums, in minutes on two CPU cores
    uv run scripts/run_llm_grpo.py --model smollm2-135m   a real chat model, through its chat template
    uv run scripts/run_llm_grpo.py --lr 1e-4 --num-rollout 40 --run-name mine

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import PRESETS
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe(PRESETS, train_from_command_line, __doc__, flag="--model")
