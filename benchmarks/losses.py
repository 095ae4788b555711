"""Log-probs and entropy from hidden states in chunks against full logits, and GAE by scan against the plain loop.

    uv run benchmarks/losses.py [--tokens 65536 --vocab 32768 --hidden 128 --chunk-size 256]

Both log-prob paths compute value and gradient, with respect to hidden states and output projection, of a loss with an
entropy bonus. Full logits at 64k tokens and a 32k vocabulary don't fit in the memory of a small machine, so the two
are timed at `--compare-tokens`, pair by pair in turn; the chunked path then runs once at `--tokens`. Peak memory is
measured in a process of its own (Linux only), and that of full logits grows in proportion to the tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from llm_rl.algorithms.gae import gae
from llm_rl.algorithms.log_probs import log_probs_from_hidden
from llm_rl.algorithms.segments import Segments

TIME_GOAL, MEMORY_GOAL, GAE_GOAL = 1.1, 0.2, 10.0
GAMMA, LAM = 0.99, 0.95


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """This project's path."""
    log_probs, entropy = log_probs_from_hidden(hidden, weight, targets, with_entropy=True, chunk_size=chunk_size)
    assert entropy is not None
    return log_probs, entropy


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """What a trainer does that has the model return its logits."""
    log_p = (hidden @ weight.T).log_softmax(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


PATHS = {"chunked": chunked, "full": full_logits}


def step(path: str, tokens: int, vocab: int, hidden_size: int, chunk_size: int) -> tuple[float, list[Tensor]]:
    """Seconds of one forward and backward pass, and its results."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=g).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, generator=g) / hidden_size**0.5).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    advantages = torch.randn(tokens, generator=g)
    start = time.perf_counter()
    log_probs, entropy = PATHS[path](hidden, weight, targets, chunk_size)
    (-(log_probs * advantages) - 0.01 * entropy).mean().backward()
    seconds = time.perf_counter() - start
    assert hidden.grad is not None
    assert weight.grad is not None
    return seconds, [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


def peak_bytes(path: str, tokens: int, vocab: int, hidden_size: int, chunk_size: int, threads: int) -> float:
    """What one step adds to the peak resident memory of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak, (path, tokens, vocab, hidden_size, chunk_size, threads))


def _measure_peak(path: str, tokens: int, vocab: int, hidden_size: int, chunk_size: int, threads: int) -> float:
    torch.set_num_threads(threads)
    step(path, 8, 64, hidden_size, 8)  # loads the libraries
    before = _high_water_mark()
    step(path, tokens, vocab, hidden_size, chunk_size)
    return _high_water_mark() - before


def _high_water_mark() -> float:
    """Peak resident bytes of this process. `ru_maxrss` won't do: a child starts with its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status: peak memory is measured on Linux only")


def gae_loop(rewards: Tensor, values: Tensor) -> Tensor:
    """The loop over time that trainers have, on tensors (B, L)."""
    following, out = torch.zeros(rewards.shape[0]), []
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(rewards.shape[0])
        following = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAM * following
        out.append(following)
    return torch.stack(out[::-1], dim=1)


def gae_pairs(tokens: int, samples: int, pairs: int) -> list[float]:
    """Seconds of the loop over seconds of the scan, pair by pair; the values are compared first."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, samples, tokens // samples, generator=g)
    segments, mask = Segments.of([tokens // samples] * samples), torch.ones(tokens)

    def scan() -> Tensor:
        return gae(rewards.flatten(), values.flatten(), mask, segments, gamma=GAMMA, lam=LAM)[0]

    torch.testing.assert_close(scan(), gae_loop(rewards, values).flatten(), rtol=1e-4, atol=1e-4)
    return [seconds(lambda: gae_loop(rewards, values)) / seconds(scan, repeat=20) for _ in range(pairs)]


def seconds(function: Callable[[], object], repeat: int = 1) -> float:
    """Mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - start) / repeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--compare-tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--gae-tokens", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.vocab, args.hidden, args.chunk_size)

    runs, results = [], {}
    for pair in range(args.pairs + 1):  # the first pair warms up
        took = {}
        for path in PATHS if pair % 2 else reversed(PATHS):
            took[path], results[path] = step(path, args.compare_tokens, *shape)
        if pair:
            runs.append({**took, "ratio": took["chunked"] / took["full"]})
    for got, expected in zip(results["chunked"], results["full"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    results.clear()
    time_ratio = statistics.median(run["ratio"] for run in runs)

    full_small = peak_bytes("full", args.compare_tokens, *shape, args.threads)
    full_peak = full_small * args.tokens / args.compare_tokens
    chunked_peak = peak_bytes("chunked", args.tokens, *shape, args.threads)
    memory_ratio = chunked_peak / full_peak
    logits_bytes = args.tokens * args.vocab * 4.0

    speedups = {n: gae_pairs(args.gae_tokens, n, args.pairs) for n in (1, 8)}
    gae_speedup = min(statistics.median(x) for x in speedups.values())

    gib = 2.0**30
    print(f"log-prob + entropy, forward and backward, vocabulary {args.vocab}, hidden size {args.hidden}, float32")
    print(f"{'':32}{'chunked':>12}{'full':>12}{'ratio':>9}{'goal':>9}")
    for name in ("chunked", "full"):
        took = [run[name] for run in runs]
        print(f"  {name} at {args.compare_tokens} tokens, seconds: {', '.join(f'{t:.2f}' for t in took)}")
    best = [min(run[path] for run in runs) for path in PATHS]
    print(f"{'seconds (least of pairs)':32}{best[0]:12.2f}{best[1]:12.2f}{time_ratio:9.2f}{TIME_GOAL:9.2f}")
    label = f"GiB at {args.tokens} tokens"
    print(f"{label:32}{chunked_peak / gib:12.2f}{full_peak / gib:12.2f}{memory_ratio:9.3f}{MEMORY_GOAL:9.2f}")
    print(f"  one tensor of {args.tokens} x {args.vocab} logits is {logits_bytes / gib:.2f} GiB;")
    print(f"  full measured {full_small / gib:.2f} GiB at {args.compare_tokens} tokens and scaled")
    print(f"GAE of {args.gae_tokens} tokens: loop over scan, times faster (goal {GAE_GOAL:g})")
    for n, values in speedups.items():
        print(f"  {n} sample(s): {statistics.median(values):.0f}  ({', '.join(f'{v:.0f}' for v in values)})")
    summary = {
        "benchmark": "losses",
        "ratio": round(time_ratio, 4),
        "goal": TIME_GOAL,
        "runs": [{k: round(v, 4) for k, v in run.items()} for run in runs],
        "memory_ratio": round(memory_ratio, 4),
        "memory_goal": MEMORY_GOAL,
        "gae_speedup": round(gae_speedup, 1),
        "gae_goal": GAE_GOAL,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
