"""The objective in plain loops: one sequence at a time through the Hugging Face model, no packing, no sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fsdp_helpers import row_log_probs
from transformers import AutoModelForCausalLM


def plain_model(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def policy_gradient_loss(
    model: torch.nn.Module,
    rows: list[dict],
    *,
    per_token: bool = False,
    temperature: float = 1.0,
    old: dict[int, torch.Tensor] | None = None,
    eps: float = 0.2,
    advantages: Sequence[np.ndarray] | None = None,
    weights: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The clipped loss; `old` gives the old log-probs of row i, by default the current ones.

    `advantages` has one number a response token of each row; by default each is the row's reward. `weights` multiply
    the losses of the tokens.
    """
    tokens_of_sample: dict[int, float] = defaultdict(float)
    for row in rows:
        tokens_of_sample[row["sample_index"]] += float(row["loss_mask"].sum())
    total = sum(tokens_of_sample.values())
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for i, row in enumerate(rows):
        log_probs = row_log_probs(model, row, temperature)
        before = log_probs.detach() if old is None or i not in old else old[i]
        for t in range(row["response_length"]):
            if not row["loss_mask"][t]:
                continue
            ratio = torch.exp(log_probs[t] - before[t])
            advantage = row["reward"] if advantages is None else float(advantages[i][t])
            value = torch.maximum(-ratio * advantage, -ratio.clamp(1 - eps, 1 + eps) * advantage)
            value = value if weights is None else value * weights[i][t]
            if per_token:
                loss = loss + value / total
            else:
                loss = loss + value / (tokens_of_sample[row["sample_index"]] * len(tokens_of_sample))
    return loss


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of each parameter by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def assert_same_gradients(found: dict, expected: dict, *, rtol: float, atol: float) -> None:
    """Compare by name; tolerances are relative to the largest entry of the whole gradient."""
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].to(gradient.dtype), gradient, rtol=rtol, atol=atol * scale, msg=name)
