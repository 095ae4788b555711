"""Direct preference optimisation of a language model.

    uv run scripts/run_llm_dpo.py               a tiny model learns to prefer right sums to its own wrong ones
    uv run scripts/run_llm_dpo.py --in-process  the same without Ray
    uv run llm-rl train --loss-type dpo_loss --hf-checkpoint MODEL --prompt-data pairs.jsonl --input-key prompt \\
        --rollout-batch-size 64                 your own model and rows of prompt, chosen and rejected

Every flag of `llm-rl train --help` can follow. `--no-cache` makes the model and the data anew.
"""

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import DPO_PRESETS
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe(DPO_PRESETS, train_from_command_line, __doc__, flag="--model")
