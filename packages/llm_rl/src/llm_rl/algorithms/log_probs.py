"""Log-probability and entropy of sampled tokens, from logits or from hidden states, in chunks.

Both ways run the same arithmetic chunk by chunk and compute their gradient by hand, so neither holds more than a
chunk of probabilities, and the second never holds the logits. Probabilities are float32 (float64 for float64 input).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_SIZE = 1024

# exp of this is 0 in float64 too; a finite stand-in for log 0 keeps 0 · log 0 at 0.
_LOG_ZERO = -1.0e4


class TokenLogProbs(NamedTuple):
    """Of each position: the target's log-probability (N,) and, if asked for, the distribution's entropy (N,)."""

    log_probs: Tensor
    entropy: Tensor | None


def log_probs_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> TokenLogProbs:
    """Log-probabilities of `targets` under softmax(logits / temperature).

    Args:
        logits: (N, V) at the positions that predict the targets.
        targets: int64 (N,).
        temperature: The rollout's temperature.
        with_entropy: Also return the entropy, in nats. Detach it to observe it without paying for its gradient.
        chunk_size: Positions worked on at a time (`--log-probs-chunk-size`), default 1024.

    Returns:
        float32 (N,), or float64 for float64 logits. A position whose upstream gradient is 0 gets gradient 0 even where
        its logits are not finite. A token of logit -inf has log-probability -inf and adds nothing to the entropy.

    Raises:
        ValueError: For mismatched shapes, a temperature or chunk size that isn't positive.
    """
    _check(logits, targets, temperature, chunk_size)
    outputs = _FromLogits.apply(logits, targets, temperature, with_entropy, chunk_size or DEFAULT_CHUNK_SIZE)
    return TokenLogProbs(outputs[0], outputs[1] if with_entropy else None)


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> TokenLogProbs:
    """As :func:`log_probs_from_logits` of `hidden @ weight.T`, without ever holding those (N, V) logits.

    The backward pass computes each chunk's logits again: one more matrix product, for a peak memory of about
    2 · chunk_size · V numbers instead of several times N · V.

    Args:
        hidden: (N, H), the last hidden states at the positions that predict the targets.
        weight: (V, H), the output projection. Its gradient accumulates in float32 and comes back in its own dtype.
        targets: int64 (N,).
        temperature: The rollout's temperature.
        with_entropy: Also return the entropy, in nats.
        chunk_size: Positions worked on at a time (`--log-probs-chunk-size`), default 1024.

    Returns:
        As :func:`log_probs_from_logits`.

    Raises:
        ValueError: As :func:`log_probs_from_logits`.
    """
    _check(hidden, targets, temperature, chunk_size)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"hidden states {tuple(hidden.shape)} don't fit an output projection {tuple(weight.shape)}")
    outputs = _FromHidden.apply(hidden, weight, targets, temperature, with_entropy, chunk_size or DEFAULT_CHUNK_SIZE)
    return TokenLogProbs(outputs[0], outputs[1] if with_entropy else None)


def _check(scores: Tensor, targets: Tensor, temperature: float, chunk_size: int | None) -> None:
    if scores.ndim != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(f"expected (N, ·) and (N,), got {tuple(scores.shape)} and targets {tuple(targets.shape)}")
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a positive temperature, not {temperature}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"the chunk size must be at least 1, not {chunk_size}")


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cool(scores: Tensor, temperature: float) -> Tensor:
    return scores if temperature == 1.0 else scores.div_(temperature)


def _outputs(scores: Tensor, dtype: torch.dtype, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for log-probs, log-partitions and entropies (none of the last if they aren't wanted)."""
    n = scores.shape[0]
    log_probs, log_z = scores.new_empty(n, dtype=dtype), scores.new_empty(n, dtype=dtype)
    return log_probs, log_z, scores.new_empty(n if with_entropy else 0, dtype=dtype)


def _forward_chunk(scores: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, log-partition and entropy of scores (C, V) already over temperature; overwrites `scores`."""
    chosen = scores.gather(1, targets[:, None]).squeeze(1)
    if not with_entropy:
        log_z = scores.logsumexp(dim=1)
        return chosen - log_z, log_z, None
    top = scores.amax(dim=1)
    scores.sub_(top[:, None]).clamp_(min=_LOG_ZERO)
    weights = scores.exp()
    total = weights.sum(dim=1)
    # H = log Z - Σ p·z, here with z relative to the largest score.
    expected = torch.bmm(weights[:, None, :], scores[:, :, None]).view(-1) / total
    log_total = total.log()
    return chosen - top - log_total, top + log_total, log_total - expected


def _backward_chunk(
    scores: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, g_log_prob: Tensor, g_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to scores (C, V), in place: g·(onehot - p) - h·p·(log p + H)."""
    log_p = scores.sub_(log_z[:, None])
    if g_entropy is None:
        grad = log_p.exp_().mul_(-g_log_prob[:, None])
    else:
        p = log_p.clamp_(min=_LOG_ZERO).exp()
        offset = (g_entropy * entropy + g_log_prob)[:, None]
        grad = log_p.mul_(g_entropy[:, None]).add_(offset).neg_().mul_(p)
    return grad.scatter_add_(1, targets[:, None], g_log_prob[:, None].to(grad.dtype))


def _unused(log_z: Tensor, g_log_prob: Tensor, g_entropy: Tensor | None) -> Tensor | None:
    """Positions with non-finite scores that nothing depends on (bool (N,)), or None if there are none."""
    unused = ~log_z.isfinite() & (g_log_prob == 0)
    if g_entropy is not None:
        unused &= g_entropy == 0
    return unused if bool(unused.any()) else None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(logits.dtype)
        log_probs, log_z, entropy = _outputs(logits, dtype, with_entropy)
        for start in range(0, logits.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            scores = _cool(logits[part].to(dtype, copy=True), temperature)
            log_probs[part], log_z[part], h = _forward_chunk(scores, targets[part], with_entropy)
            if h is not None:
                entropy[part] = h
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_log_prob: Tensor | None, g_entropy: Tensor | None) -> Any:
        logits, targets, log_z, entropy = ctx.saved_tensors
        if g_log_prob is None:
            g_log_prob = torch.zeros_like(log_z)
        grad = torch.empty_like(logits)
        unused = _unused(log_z, g_log_prob, g_entropy)
        for start in range(0, logits.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            scores = _cool(logits[part].to(log_z.dtype, copy=True), ctx.temperature)
            g_h = None if g_entropy is None else g_entropy[part]
            piece = _backward_chunk(scores, targets[part], log_z[part], entropy[part], g_log_prob[part], g_h)
            if unused is not None:
                piece.masked_fill_(unused[part, None], 0.0)
            grad[part] = _cool(piece, ctx.temperature)
        return grad, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(hidden.dtype)
        log_probs, log_z, entropy = _outputs(hidden, dtype, with_entropy)
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            scores = _cool((hidden[part] @ weight.T).to(dtype), temperature)
            log_probs[part], log_z[part], h = _forward_chunk(scores, targets[part], with_entropy)
            if h is not None:
                entropy[part] = h
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_log_prob: Tensor | None, g_entropy: Tensor | None) -> Any:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        if g_log_prob is None:
            g_log_prob = torch.zeros_like(log_z)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if need_weight else None
        unused = _unused(log_z, g_log_prob, g_entropy)
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            h = hidden[part]
            scores = _cool((h @ weight.T).to(log_z.dtype), ctx.temperature)
            g_h = None if g_entropy is None else g_entropy[part]
            grad = _backward_chunk(scores, targets[part], log_z[part], entropy[part], g_log_prob[part], g_h)
            if unused is not None:
                grad.masked_fill_(unused[part, None], 0.0)
                h = h.masked_fill(unused[part, None], 0.0)
            grad = _cool(grad, ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ h
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
