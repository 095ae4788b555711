"""Rows and references for the tests of the FSDP trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.training.learner import Learner
from shared_runtime.training.plan import StepPlan, plan_rollout

VOCABULARY = range(3, 15)


def make_rows(
    seed: int = 0, *, groups: int = 3, group_size: int = 4, prompts=(3, 9), responses=(1, 12), version: int = 0
) -> list[dict]:
    """Groups of rows that share a prompt, with ragged responses, a masked token here and there, and rewards."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = rng.choice(VOCABULARY, rng.integers(*prompts))
        for _ in range(group_size):
            length = int(rng.integers(*responses))
            mask = np.ones(length, dtype=np.float32)
            if length > 2:
                mask[rng.integers(length)] = 0
            rows.append(
                {
                    "tokens": np.concatenate([prompt, rng.choice(VOCABULARY, length)]).astype(np.int64),
                    "response_length": length,
                    "loss_mask": mask,
                    "reward": float(rng.normal()),
                    "rollout_log_probs": rng.normal(-2.6, 0.3, length).astype(np.float32),
                    "weight_version": version,
                    "sample_index": len(rows),
                }
            )
    return rows


def plan(rows: list[dict], **layout) -> list[list[StepPlan]]:
    """`plan_rollout` with the numbers that the rows hold."""
    layout = {"dp_size": 1, "num_steps": 1, "max_tokens_per_gpu": 10_000} | layout
    return plan_rollout(
        rows,
        [len(row["tokens"]) for row in rows],
        [row["sample_index"] for row in rows],
        [int(np.sum(row["loss_mask"])) for row in rows],
        **layout,
    )


def make_trainer(directory: Path, **changes) -> FsdpTrainer:
    """A started single-rank fp32 trainer on the CPU."""
    settings = {"train_dtype": "fp32", "lr": 1e-3, "weight_decay": 0.0, "device": "cpu"} | changes
    trainer = FsdpTrainer(FsdpTrainerSettings(hf_checkpoint=directory, **settings))
    trainer.init()
    return trainer


def full_weights(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model.named_parameters()}


def row_log_probs(model: torch.nn.Module, row: dict, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a row's response from a plain forward of that sequence alone."""
    tokens = torch.as_tensor(row["tokens"])[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
    return chosen[len(row["tokens"]) - 1 - row["response_length"] :]


def row_values(model: torch.nn.Module, row: dict) -> torch.Tensor:
    """Values of a row's response tokens from a plain forward of a token classifier over that sequence alone."""
    outputs = model(input_ids=torch.as_tensor(row["tokens"])[None]).logits[0, :-1, 0]
    return outputs[len(row["tokens"]) - 1 - row["response_length"] :]


def capture_gradients(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """Make the trainer's next optimizer step record the (unclipped) gradient instead of applying it; a live dict.

    The critic's has names that start with `critic.`.
    """
    seen: dict[str, torch.Tensor] = {}

    def hold(learner: Learner, prefix: str) -> None:
        def record(*args, **kwargs) -> None:
            for name, p in learner.model.named_parameters():
                if p.requires_grad:
                    seen[prefix + name] = p.grad.full_tensor().detach().clone()

        learner.optimizer.step = record
        learner.schedule.step = lambda: None

    hold(trainer.learner, "")
    if trainer.critic is not None:
        hold(trainer.critic.learner, "critic.")
    return seen
