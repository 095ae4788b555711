"""Log-probabilities of several candidate tokens at each position, over the vocabulary or over a recorded support."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_runtime.algorithms.masking import select

NO_CANDIDATE = -1


class CandidateLogProbs(NamedTuple):
    """Ids (N, K) and their log-probabilities (N, K) over the full vocabulary."""

    ids: Tensor
    log_probs: Tensor


class SupportLogProbs(NamedTuple):
    """Over each position's support: the target's log-probability, the candidates', and the entropy."""

    log_probs: Tensor
    candidate_log_probs: Tensor
    entropy: Tensor


def candidate_log_probs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Full-vocabulary log-probabilities of the candidates; -inf, and no gradient, where there is none.

    Args:
        logits: (N, V).
        ids: int64 (N, K), -1 in unused slots.
        temperature: The rollout's temperature.
        mask: (N,); logits of unselected positions count as 0, whatever they are, and get no gradient.

    Returns:
        float32 (N, K), float64 for float64 logits.
    """
    scores = _scores(logits if mask is None else select(mask[:, None], logits), temperature)
    used = ids != NO_CANDIDATE
    chosen = scores.gather(1, ids.clamp(min=0)) - scores.logsumexp(dim=1, keepdim=True)
    return select(used, chosen, -torch.inf)


def top_k_log_probs(logits: Tensor, k: int, *, temperature: float = 1.0) -> CandidateLogProbs:
    """The k likeliest tokens of each position with their full-vocabulary log-probabilities, without gradient."""
    scores = _scores(logits.detach(), temperature)
    values, ids = scores.topk(k, dim=1)
    return CandidateLogProbs(ids, values - scores.logsumexp(dim=1, keepdim=True))


def support_log_probs(
    logits: Tensor, targets: Tensor, support_ids: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None
) -> SupportLogProbs:
    """Sampling-support replay: log-probabilities renormalised over the tokens that top-k and top-p had left.

    q(a) = exp(z_a / T) / Σ_{j∈S} exp(z_j / T): the distribution the token was drawn from, with the trainer's logits.
    The support is data; the gradient flows through the logits of its tokens alone.

    Args:
        logits: (N, V).
        targets: int64 (N,), each in its support (:func:`check_support`); a token outside gets -inf. A tool's token has
            the support of itself and log-probability 0.
        support_ids: int64 (N, K), -1 in unused slots, no id twice.
        temperature: The rollout's temperature.
        mask: (N,); logits of unselected positions count as 0, whatever they are, and get no gradient.

    Returns:
        float32 (N,), (N, K) with -inf in unused slots, and (N,) in nats; float64 for float64 logits.
    """
    used = support_ids != NO_CANDIDATE
    # Gather before the cast: memory for K numbers a position, not for V.
    gathered = _scores(logits.gather(1, support_ids.clamp(min=0)), temperature)
    if mask is not None:
        gathered = select(mask[:, None], gathered)
    scores = select(used, gathered, -torch.inf)
    # A position without any candidate: keep the softmax away from -inf - -inf.
    scores = scores.masked_fill(~used.any(dim=1, keepdim=True), 0.0)
    log_q = scores.log_softmax(dim=1)
    entropy = -(log_q.exp() * select(used, log_q)).sum(dim=1)
    hit = (support_ids == targets[:, None]) & used
    log_probs = select(hit, log_q).sum(dim=1).masked_fill(~hit.any(dim=1), -torch.inf)
    return SupportLogProbs(log_probs, select(used, log_q, -torch.inf), entropy)


def check_support(targets: Tensor, support_ids: Tensor) -> None:
    """Refuse supports that can't be replayed.

    Args:
        targets: int64 (N,).
        support_ids: int64 (N, K), -1 in unused slots.

    Raises:
        ValueError: If a sampled token isn't in its support, or an id stands twice in a row.
    """
    missing = ~(support_ids == targets[:, None]).any(dim=1)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise ValueError(
            f"position {row}: the sampled token {int(targets[row])} is not in its recorded sampling support of "
            f"{int((support_ids[row] != NO_CANDIDATE).sum())} tokens ({int(missing.sum())} such positions)"
        )
    ordered = support_ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_CANDIDATE)).any(dim=1)
    if bool(twice.any()):
        raise ValueError(f"position {int(twice.nonzero()[0])}: a token stands twice in its recorded sampling support")


def from_hidden_in_chunks(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    hidden: Tensor,
    weight: Tensor,
    *per_position: Tensor,
    chunk_size: int = 1024,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Apply `function(logits, *per_position)` to `hidden @ weight.T` chunk by chunk, recomputing in backward.

    Serves any function of logits whose result is small, such as :func:`support_log_probs`, without holding (N, V).

    Args:
        function: Takes (C, V) logits and the chunk of each further tensor; returns tensors of C rows.
        hidden: (N, H).
        weight: (V, H).
        per_position: Tensors of N rows.
        chunk_size: Positions worked on at a time.
        mask: (N,); hidden states of unselected positions count as 0, whatever they are, and get no gradient.

    Returns:
        The results, concatenated.
    """

    def run(h: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        out = function(h @ w.T, *rest)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    if mask is not None:
        hidden = select(mask[:, None], hidden)
    starts = range(0, max(hidden.shape[0], 1), chunk_size)
    parts = []
    for start in starts:
        piece = slice(start, start + chunk_size)
        rest = (x[piece] for x in per_position)
        parts.append(checkpoint(run, hidden[piece], weight, *rest, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _scores(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a positive temperature, not {temperature}")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature
