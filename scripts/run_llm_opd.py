"""On-policy distillation on a language model.

    uv run scripts/run_llm_opd.py                            a tiny model learns sums from a teacher, without rewards
    uv run scripts/run_llm_opd.py --opd-log-prob-top-k 8     whole distributions instead of sampled tokens
    uv run scripts/run_llm_opd.py --opd-type sglang --opd-teacher-load None --rm-url http://host:30000/generate

The first run trains the teacher, in minutes on two CPU cores. Every flag of `llm-rl train --help` can follow.
`--no-cache` makes models and data anew.
"""

from llm_rl.cli import train_from_command_line
from llm_rl.presets.recipes import tiny_opd
from shared_runtime.recipe import run_recipe

if __name__ == "__main__":
    run_recipe({"tiny": tiny_opd}, train_from_command_line, __doc__)
