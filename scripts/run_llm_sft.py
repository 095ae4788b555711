"""Supervised fine-tuning of a language model.

    uv run scripts/run_llm_sft.py               a tiny model learns sums from drawn weights
    uv run scripts/run_llm_sft.py --in-process  the same without Ray
    uv run llm-rl train --loss-type sft_loss --hf-checkpoint MODEL --prompt-data chats.jsonl --input-key messages \\
        --rollout-batch-size 64                 your own model and conversations

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import SFT_PRESETS
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe(SFT_PRESETS, train_from_command_line, __doc__, flag="--model")
