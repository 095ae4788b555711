"""The tiny preset's supervised warm-up: from random weights to about a third of the sums right, or to a teacher."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llm_rl.engines.local import LocalEngine
from llm_rl.presets.tiny import write_model
from llm_rl.sample import GenerateRequest, SamplingParams, TrainRow
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.training.plan import plan_rollout
from shared_runtime.weight_sync.session import publish

BATCH_SIZE = 128
CHECK_FROM = 120
CHECK_EVERY = 5
TARGET = 1 / 3
TEACHER_TARGET = 0.97
MAX_STEPS = 3000
"""Several times what it takes."""


def warm_up(directory: Path, sums: Path, *, seed: int = 0, target: float = TARGET) -> None:
    """Train the tiny model on correct sums until it gets enough of the held-out ones right, and save it.

    Args:
        directory: Where the model goes.
        sums: Directory with `train.jsonl` and `held_out.jsonl`.
        seed: Of the initial weights and of the order of the sums.
        target: Share of the held-out sums, answered greedily.

    Raises:
        RuntimeError: If it doesn't learn.
    """
    with tempfile.TemporaryDirectory() as untrained:
        write_model(Path(untrained), seed)
        _train(Path(untrained), directory, sums, seed, target)


def _train(untrained: Path, directory: Path, sums: Path, seed: int, target: float) -> None:
    trainer = InProcessGroup(FsdpTrainer(_settings(untrained)))
    engine = LocalEngine(untrained)
    engines = InProcessGroup(engine)
    train, held_out = (_read(sums / name) for name in ("train.jsonl", "held_out.jsonl"))
    rows = [_row(engine.tokenizer, entry) for entry in train]
    rng = np.random.default_rng(seed)
    trainer.call("init")
    try:
        for step in range(1, MAX_STEPS + 1):
            batch = [rows[i] for i in rng.choice(len(rows), BATCH_SIZE, replace=False)]
            trainer.call_each("train", [(step, _plan(batch))])
            if step >= CHECK_FROM and step % CHECK_EVERY == 0:
                publish(trainer, engines, step, buffer_size=1 << 26)
                if accuracy(engine, held_out, temperature=0.0) >= target:
                    trainer.call("save_hf", directory)
                    return
    finally:
        trainer.shutdown()
    raise RuntimeError(f"the tiny model did not learn sums in {MAX_STEPS} steps")


def accuracy(engine: LocalEngine, entries: list[dict[str, str]], *, temperature: float) -> float:
    """Share of prompts whose response is the label: a sampled response, or with temperature 0 the likeliest."""
    params = SamplingParams(max_new_tokens=4, temperature=temperature)
    prompts = [engine.tokenizer(entry["prompt"], add_special_tokens=False)["input_ids"] for entry in entries]
    requests = [GenerateRequest(str(i), tuple(ids), params, seed=i) for i, ids in enumerate(prompts)]
    responses = [
        engine.tokenizer.decode(list(output.output_ids), skip_special_tokens=True)
        for output in engine.generate(requests)
    ]
    return float(np.mean([response == entry["label"] for response, entry in zip(responses, entries, strict=True)]))


def _settings(directory: Path) -> FsdpTrainerSettings:
    return FsdpTrainerSettings(
        hf_checkpoint=directory, train_dtype="fp32", loss_type="sft_loss", optimizer="adam", lr=1e-3, weight_decay=0.0
    )


def _plan(batch: list[dict[str, Any]]) -> list[Any]:
    lengths = [len(row["tokens"]) for row in batch]
    trainable = [row["response_length"] for row in batch]
    return plan_rollout(
        batch,
        lengths,
        range(len(batch)),
        trainable,
        dp_size=1,
        num_steps=1,
        max_tokens_per_gpu=sum(lengths),
    )[0]


def _row(tokenizer: Any, entry: dict[str, str]) -> TrainRow:
    prompt = tokenizer(entry["prompt"], add_special_tokens=False)["input_ids"]
    response = tokenizer(entry["label"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return TrainRow(
        tokens=np.asarray(prompt + response, dtype=np.int64),
        response_length=len(response),
        loss_mask=np.ones(len(response), dtype=np.float32),
    )


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
