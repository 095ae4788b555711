"""Training throughput on a long-tailed mix of lengths: documents packed without padding against padded rows.

    uv run benchmarks/packing.py [--rows 96 --median 48 --max-length 1024 --pairs 5]

Both sides run the whole FSDP trainer (forward, backward, optimizer) on the same rows in the same micro-batches, in
alternating pairs; every row has a prompt of its own, so shared prompts save nothing here. Tokens are those of the rows.
Padding is what the model computes beyond them, in its linear layers; what the attention kernel pads when it gathers
documents of similar length is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _common  # noqa: F401
import numpy as np
import torch

from llm_rl.sample import TrainRow
from llm_rl.trainers.fsdp.packing import pack_rows
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.training.plan import StepPlan, plan_rollout

PADDING_GOAL = 0.03
VOCABULARY = 512


def write_model(directory: Path, max_length: int) -> None:
    """A Qwen3-architecture model of two million parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def long_tailed_rows(count: int, median: int, max_length: int, seed: int = 0) -> list[TrainRow]:
    """Rows whose lengths are log-normal (σ = 1) around `median`, a quarter of each row its prompt."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(median), 1.0, count).astype(int), 8, max_length)
    rows = []
    for index, length in enumerate(lengths):
        response = int(length - length // 4)
        rows.append(
            TrainRow(
                tokens=rng.integers(0, VOCABULARY, length),
                response_length=response,
                loss_mask=np.ones(response, dtype=np.float32),
                reward=float(rng.normal()),
                sample_index=index,
            )
        )
    return rows


def plan(rows: list[TrainRow], budget: int) -> list[StepPlan]:
    """One optimizer step."""
    lengths = [len(row["tokens"]) for row in rows]  # type: ignore[arg-type]
    trainable = [row["response_length"] for row in rows]
    untyped: list[dict[str, Any]] = [dict(row) for row in rows]
    return plan_rollout(
        untyped, lengths, range(len(rows)), trainable, dp_size=1, num_steps=1, max_tokens_per_gpu=budget
    )[0]


def padding_shares(steps: list[StepPlan]) -> dict[str, float]:
    """Share of computed tokens that are padding: padded rows, packed rows, and the packed attention kernel."""
    needed = padded = packed = gathered = 0
    for step in steps:
        for indices in step.micro_batches:
            tokens = [np.asarray(step.rows[i]["tokens"], dtype=np.int64) for i in indices]
            pack = pack_rows(tokens, [step.rows[i]["response_length"] for i in indices])
            # The last token of a row is predicted and never read, packed or padded.
            needed += sum(len(t) - 1 for t in tokens)
            padded += len(tokens) * max(len(t) for t in tokens)
            packed += pack.num_tokens
            gathered += sum(group.queries.numel() for group in pack.groups)
    return {"padded": 1 - needed / padded, "packed": 1 - needed / packed, "packed, attention": 1 - needed / gathered}


def measure(trainer: FsdpTrainer, rollout_id: int, steps: list[StepPlan]) -> float:
    """Seconds of one update."""
    start = time.perf_counter()
    trainer.train(rollout_id, steps)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--median", type=int, default=48, help="median length in tokens")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    rows = long_tailed_rows(options.rows, options.median, options.max_length)
    steps = plan(rows, options.max_tokens_per_gpu)
    total = sum(len(row["tokens"]) for row in rows)  # type: ignore[misc,arg-type]
    shares = padding_shares(steps)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), options.max_length)
        trainers = {}
        for name, attention in (("packed", None), ("padded", "sdpa")):
            settings = FsdpTrainerSettings(
                hf_checkpoint=Path(directory), train_dtype="fp32", lr=1e-5, attn_implementation=attention
            )
            trainers[name] = FsdpTrainer(settings)
            trainers[name].init()
            measure(trainers[name], 0, steps)  # warm-up
        runs = []
        for pair in range(options.pairs):
            seconds = {name: measure(trainer, pair + 1, steps) for name, trainer in trainers.items()}
            runs.append({name: round(total / s, 1) for name, s in seconds.items()})
        for trainer in trainers.values():
            trainer.shutdown()
    speedup = statistics.median(run["packed"] / run["padded"] for run in runs)
    print(f"{options.rows} rows, {total} tokens, in {len(steps[0].micro_batches)} micro-batches")
    print(f"{'':20} {'tokens/s':>10} {'padding':>9}")
    for name in ("padded", "packed"):
        rate = statistics.median(run[name] for run in runs)
        print(f"{name:20} {rate:>10.0f} {shares[name]:>9.1%}")
    print(f"{'packed, attention':20} {'':>10} {shares['packed, attention']:>9.1%}")
    print(f"packed is {speedup:.2f} times as fast")
    result = {
        "benchmark": "packing",
        "ratio": round(shares["packed"], 4),
        "goal": PADDING_GOAL,
        "speedup": round(speedup, 3),
        "padding": {name: round(share, 4) for name, share in shares.items()},
        "runs": runs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
