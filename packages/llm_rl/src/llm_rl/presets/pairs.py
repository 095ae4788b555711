"""Preference pairs of the tiny preset: right sums, and wrong ones that the warm model drew itself."""

from __future__ import annotations

import json
from pathlib import Path

from llm_rl.engines.local import LocalEngine
from llm_rl.sample import GenerateRequest, SamplingParams


def write_pairs(path: Path, model: Path, sums: Path) -> int:
    """Write JSONL rows `{"prompt", "chosen", "rejected"}`, one for each sum that the model gets wrong.

    Args:
        path: Where they go.
        model: A Hugging Face directory.
        sums: JSONL rows `{"prompt", "label"}`.

    Returns:
        How many there are.
    """
    engine = LocalEngine(model)
    rows = [json.loads(line) for line in sums.read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=4)
    prompts = engine.tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    requests = [GenerateRequest(str(i), tuple(ids), params, seed=i) for i, ids in enumerate(prompts)]
    drawn = [engine.tokenizer.decode(list(o.output_ids), skip_special_tokens=True) for o in engine.generate(requests)]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["label"], "rejected": wrong}
        for row, wrong in zip(rows, drawn, strict=True)
        if wrong not in ("", row["label"])
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return len(pairs)
