"""Draws and warped distributions against independent implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from llm_rl.engines.sampling import RowParams, draw, uniforms, warp
from llm_rl.sample import SamplingParams

MASK = 2**64 - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in Python integers."""
    state, out = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def test_uniforms_are_splitmix64() -> None:
    # The reference values that the algorithm is published with.
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seeds = [0, 1, 1234567, 2**63, MASK]
    for seed in seeds:
        stream = splitmix64(splitmix64(seed, 1)[0], 300)
        positions = np.array([0, 1, 7, 299], dtype=np.uint64)
        expected = [(stream[int(p)] >> 11) / 2**53 for p in positions]
        assert uniforms(np.full(4, seed, dtype=np.uint64), positions).tolist() == expected


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_neighbouring_seeds_and_positions_give_independent_uniforms(along: str) -> None:
    count = np.arange(20_000, dtype=np.uint64)
    fixed = np.full_like(count, 5)
    numbers = uniforms(count, fixed) if along == "seeds" else uniforms(fixed, count)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def reference_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, top-k, then the smallest set of the rest that has at least mass `top_p`; float64, one row."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities)
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += probabilities[token]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.6, -1, 1.0), (1.7, 5, 1.0), (1.0, 1, 1.0), (1.0, 100, 1.0), (0.8, -1, 0.5), (1.0, 8, 0.9)],
)
def test_warped_distributions_equal_the_definition(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 37, generator=torch.Generator().manual_seed(1)) * 2
    params = RowParams.of([SamplingParams(1, temperature, top_p, top_k)] * 20)
    probabilities = warp(logits, params).softmax(-1).double().numpy()
    for row, values in zip(logits.numpy(), probabilities, strict=True):
        expected = reference_distribution(row, temperature, top_k, top_p)
        assert ((values > 0) == (expected > 0)).all()
        np.testing.assert_allclose(values, expected, atol=2e-7)


def test_rows_of_a_batch_keep_their_own_parameters() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(1, 0.5),
        SamplingParams(1, 1.0, 0.7),
        SamplingParams(1, 1.0, 1.0, 3),
        SamplingParams(1, 0.0, 0.1, 2),
        SamplingParams(1, 2.0, 0.7),
    ]
    together = warp(logits.clone(), RowParams.of(params))
    for i, each in enumerate(params):
        alone = warp(logits[i : i + 1].clone(), RowParams.of([each]))
        assert torch.equal(together[i : i + 1], alone)
    chosen = torch.tensor([4, 1])
    assert torch.equal(warp(logits[chosen], RowParams.of(params).select(chosen)), together[chosen])


def test_the_drawn_token_is_where_the_cumulative_distribution_passes_the_uniform() -> None:
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    uniform = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])
    logits = probabilities.log().expand(6, 6).clone()
    tokens, log_probs, _ = draw(logits, RowParams.of([SamplingParams(1)] * 6), uniform)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    np.testing.assert_allclose(log_probs.exp().numpy(), [0.25, 0.25, 0.5, 0.5, 0.25, 0.25], rtol=1e-15)


@pytest.mark.parametrize("vocab", [3, 1000, 50_000])
def test_no_uniform_ever_draws_an_excluded_token(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=generator) * 3
    uniform = np.concatenate([np.zeros(32), np.full(32, 1 - 2**-53)])
    tokens, log_probs, _ = draw(logits.clone(), RowParams.of([SamplingParams(1, 1.0, 1.0, 2)] * 64), uniform)
    top2 = logits.topk(2).indices
    assert (tokens.unsqueeze(1) == top2).any(1).all()
    assert (tokens[:32] == top2[:32].min(1).values).all()
    assert (tokens[32:] == top2[32:].max(1).values).all()
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.5, 6, 0.9)])
def test_frequencies_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    count = 40_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    params = RowParams.of([SamplingParams(1, temperature, top_p, top_k)] * count)
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.full(count, 9, dtype=np.uint64))
    tokens, log_probs, _ = draw(logits.expand(count, 12).clone(), params, uniform)
    expected = reference_distribution(logits.numpy(), temperature, top_k, top_p)
    observed = np.bincount(tokens.numpy(), minlength=12)
    support = expected > 0
    assert observed[~support].sum() == 0
    assert stats.chisquare(observed[support], expected[support] * count).pvalue > 1e-3
    np.testing.assert_allclose(log_probs.numpy(), np.log(expected[tokens.numpy()]), atol=1e-6)


def test_greedy_is_the_likeliest_token_at_temperature_1() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, log_probs, _ = draw(logits, RowParams.of([SamplingParams(1, 0.0, 0.1, 1)]), np.array([0.999]))
    assert tokens.tolist() == [1]
    expected = 3 - np.log(np.exp([1, 3, 2]).sum())
    assert log_probs.item() == pytest.approx(expected, abs=1e-6)
