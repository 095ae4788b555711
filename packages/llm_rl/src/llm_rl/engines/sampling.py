"""Drawing the next token: pure functions of logits, parameters and seeds.

A draw depends on the request's seed and the token's position only, through a counter-based generator and the inverse of
the cumulative distribution. What else is in the batch does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from llm_rl.sample import SamplingParams

GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy, as in SGLang."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform number in [0, 1) for each pair of seed and position.

    SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195) as a counter-based generator: the
    seed is mixed once to decorrelate neighbouring seeds, the position is the counter.

    Args:
        seeds: uint64, shape (B,).
        positions: uint64, shape (B,).

    Returns:
        float64, shape (B,), multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of a batch, one entry a row; greedy rows stand with temperature 1 and no filters.

    Attributes:
        greedy: bool, shape (B,).
        temperature: Shape (B, 1).
        filters: (top_k, top_p) of each row.
        device: Where the logits are.
    """

    greedy: torch.Tensor
    temperature: torch.Tensor
    filters: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        """Collect the parameters of the rows of a batch."""
        greedy = [p.temperature < GREEDY_BELOW for p in params]
        temperature = [1.0 if g else p.temperature for p, g in zip(params, greedy, strict=True)]
        return cls(
            greedy=torch.tensor(greedy, device=device),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            filters=tuple((-1, 1.0) if g else (p.top_k, p.top_p) for p, g in zip(params, greedy, strict=True)),
        )

    def select(self, rows: torch.Tensor) -> RowParams:
        """The parameters of some rows, by index."""
        return RowParams(self.greedy[rows], self.temperature[rows], tuple(self.filters[i] for i in rows.tolist()))


def warp(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Temperature, then top-k, then top-p of what top-k has left: the order and the rules of Hugging Face's warpers.

    Args:
        logits: Shape (B, V).
        params: Of the B rows.

    Returns:
        Scores whose softmax is the distribution to draw from; excluded tokens are -inf.
    """
    scores = logits / params.temperature.to(logits.dtype)
    for top_k, top_p in set(params.filters) - {(-1, 1.0)}:
        same = [i for i, pair in enumerate(params.filters) if pair == (top_k, top_p)]
        rows = torch.tensor(same, device=logits.device)
        subset = scores[rows]
        ids = subset.new_empty((0,), dtype=torch.long)  # the warpers look at scores only
        if top_k > 0:
            subset = TopKLogitsWarper(top_k)(ids, subset)
        if top_p < 1.0:
            subset = TopPLogitsWarper(top_p)(ids, subset)
        scores[rows] = subset
    return scores


class Draw(NamedTuple):
    """Token ids, int64 (B,), their log-probabilities (B,), and those of all tokens (B, V), -inf for excluded ones."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    distribution: torch.Tensor


def draw(logits: torch.Tensor, params: RowParams, uniform: np.ndarray) -> Draw:
    """Draw one token a row, with its log-probability under the very distribution it is drawn from.

    Greedy rows take the likeliest token and its log-probability at temperature 1, as SGLang does.

    Args:
        logits: Shape (B, V), float32 or float64.
        params: Of the B rows.
        uniform: float64 in [0, 1), shape (B,).

    Returns:
        Log-probabilities in the dtype of `logits`. Where the logits are not numbers they are not finite.
    """
    log_probs = torch.log_softmax(warp(logits, params), dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    threshold = torch.from_numpy(uniform).to(logits.device).unsqueeze(1) * total
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    # Rounding may push the threshold to the total itself: then it is the last token of any probability.
    tokens = torch.minimum(tokens, torch.searchsorted(cumulative, total)).clamp_(max=logits.shape[-1] - 1).squeeze(1)
    if bool(params.greedy.any()):
        tokens = torch.where(params.greedy, logits.argmax(dim=-1), tokens)
    return Draw(tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1), log_probs)
