"""Which rank trains what in which micro-batch: pure planning over sequence lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_runtime.training.partition import balanced_bins, first_fit_decreasing, karmarkar_karp


@dataclass
class StepPlan:
    """One rank's share of one optimizer step.

    Attributes:
        rows: This rank's training rows.
        micro_batches: Indices into `rows`, one list a forward pass. All ranks have the same number of
            micro-batches, since each contains collectives; a list may be empty.
        global_num_samples: Samples of the step over all ranks (a rollout split into several rows counts once).
        global_num_tokens: Trainable tokens of the step over all ranks.
        sample_num_tokens: For each row, the trainable tokens of the whole sample that it belongs to.
        sample_slots: For each row, which of the step's samples it belongs to, numbered alike on all ranks.
        extra: Whatever a domain's trainer wants to be told.
    """

    rows: list[dict[str, Any]]
    micro_batches: list[list[int]]
    global_num_samples: int
    global_num_tokens: int
    sample_num_tokens: list[int] = field(default_factory=list)
    sample_slots: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows and len(self.sample_num_tokens) != len(self.rows):
            raise ValueError(f"{len(self.rows)} rows, but sample_num_tokens has {len(self.sample_num_tokens)} entries")


def plan_rollout(
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    sample_ids: Sequence[Hashable],
    trainable_tokens: Sequence[int],
    *,
    dp_size: int,
    num_steps: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int = 1,
    max_tokens_per_gpu: int | None = None,
    balance_data: bool = False,
) -> list[list[StepPlan]]:
    """Split the rows of one rollout over optimizer steps, data-parallel ranks and micro-batches.

    Steps take samples in order; rows of one sample stay in one step. Every row is trained exactly once. The optimizer
    step is the same whatever `dp_size`, the micro-batches and `balance_data` are, since the counts are global.

    Args:
        rows: Training rows, as the domain's trainer reads them.
        lengths: Tokens that each row costs.
        sample_ids: Which sample each row belongs to.
        trainable_tokens: Tokens of each row that enter the loss.
        dp_size: Number of data-parallel ranks.
        num_steps: Optimizer steps, of nearly equal numbers of samples. Give this or `global_batch_size`.
        global_batch_size: Samples per optimizer step.
        micro_batch_size: Rows per forward pass. Ignored with `max_tokens_per_gpu`.
        max_tokens_per_gpu: Token budget of a forward pass; rows are packed up to it.
        balance_data: Give every rank about the same number of tokens, not just of rows.

    Returns:
        For each rank, its plan of each step.

    Raises:
        ValueError: If a row exceeds the budget, or the numbers don't fit.
    """
    if not len(rows) == len(lengths) == len(sample_ids) == len(trainable_tokens):
        raise ValueError(
            f"{len(rows)} rows, {len(lengths)} lengths, {len(sample_ids)} sample ids and {len(trainable_tokens)} "
            "trainable-token counts: there must be as many of each"
        )
    if dp_size < 1 or micro_batch_size < 1:
        raise ValueError(f"dp_size and micro_batch_size must be at least 1, got {dp_size} and {micro_batch_size}")
    if max_tokens_per_gpu is not None:
        for i, length in enumerate(lengths):
            if length > max_tokens_per_gpu:
                raise ValueError(
                    f"row {i} (sample {sample_ids[i]}) has {length} tokens, more than --max-tokens-per-gpu "
                    f"{max_tokens_per_gpu}: raise the budget or shorten the responses"
                )
    tokens_of_sample: dict[Hashable, int] = defaultdict(int)
    for sample, count in zip(sample_ids, trainable_tokens, strict=True):
        tokens_of_sample[sample] += count
    plans: list[list[StepPlan]] = [[] for _ in range(dp_size)]
    for step in split_steps(sample_ids, num_steps=num_steps, global_batch_size=global_batch_size):
        shares = split_ranks(
            [lengths[i] for i in step],
            dp_size,
            balance_data=balance_data,
            equal_size=max_tokens_per_gpu is None,
        )
        rank_rows = [[step[i] for i in share] for share in shares]
        batches = split_micro_batches(
            [[lengths[i] for i in share] for share in rank_rows],
            micro_batch_size=micro_batch_size,
            max_tokens_per_gpu=max_tokens_per_gpu,
        )
        slots = {sample: slot for slot, sample in enumerate(dict.fromkeys(sample_ids[i] for i in step))}
        num_tokens = sum(trainable_tokens[i] for i in step)
        for rank, share in enumerate(rank_rows):
            plans[rank].append(
                StepPlan(
                    rows=[rows[i] for i in share],
                    micro_batches=batches[rank],
                    global_num_samples=len(slots),
                    global_num_tokens=num_tokens,
                    sample_num_tokens=[tokens_of_sample[sample_ids[i]] for i in share],
                    sample_slots=[slots[sample_ids[i]] for i in share],
                )
            )
    return plans


def split_steps(
    sample_ids: Sequence[Hashable], *, num_steps: int | None = None, global_batch_size: int | None = None
) -> list[list[int]]:
    """Row indices of each optimizer step: samples in order of first appearance, never divided.

    Raises:
        ValueError: If both or neither of `num_steps` and `global_batch_size` are given, or don't fit.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for i, sample in enumerate(sample_ids):
        rows_of.setdefault(sample, []).append(i)
    samples = list(rows_of)
    if (num_steps is None) == (global_batch_size is None):
        raise ValueError("give either num_steps or global_batch_size")
    if global_batch_size is not None:
        if global_batch_size < 1 or not samples or len(samples) % global_batch_size:
            raise ValueError(f"{len(samples)} samples are no multiple of --global-batch-size {global_batch_size}")
        num_steps = len(samples) // global_batch_size
    assert num_steps is not None
    if not 1 <= num_steps <= len(samples):
        raise ValueError(f"{len(samples)} samples can't fill --num-steps-per-rollout {num_steps}")
    return [
        sorted(i for sample in chunk for i in rows_of[sample])
        for chunk in (_chunk(samples, num_steps, s) for s in range(num_steps))
    ]


def split_ranks(
    lengths: Sequence[int], dp_size: int, *, balance_data: bool = False, equal_size: bool = False
) -> list[list[int]]:
    """Indices for each rank: contiguous shares of equal count, or shares of about equal token sums.

    Args:
        lengths: Tokens of each row.
        dp_size: Number of ranks.
        balance_data: Balance token sums (Karmarkar-Karp).
        equal_size: Keep the counts equal (up to one) when balancing too: with a fixed micro-batch size the rank with
            the most rows sets the number of forward passes of all.
    """
    if not balance_data:
        return [list(_chunk(range(len(lengths)), dp_size, rank)) for rank in range(dp_size)]
    return karmarkar_karp(lengths, dp_size, equal_size=equal_size)


def split_micro_batches(
    lengths_of_rank: Sequence[Sequence[int]], *, micro_batch_size: int = 1, max_tokens_per_gpu: int | None = None
) -> list[list[list[int]]]:
    """Indices of each micro-batch for each rank, the same number of micro-batches (at least one) on all ranks.

    Raises:
        ValueError: If a row exceeds the token budget.
    """
    if max_tokens_per_gpu is None:
        count = max([1, *(-(-len(lengths) // micro_batch_size) for lengths in lengths_of_rank)])
        return [
            [list(range(m * micro_batch_size, min((m + 1) * micro_batch_size, len(lengths)))) for m in range(count)]
            for lengths in lengths_of_rank
        ]
    count = max([1, *(len(first_fit_decreasing(lengths, max_tokens_per_gpu)) for lengths in lengths_of_rank)])
    return [balanced_bins(lengths, count, max_tokens_per_gpu) for lengths in lengths_of_rank]


def _chunk(items: Sequence[Any], num_chunks: int, index: int) -> Sequence[Any]:
    """One of `num_chunks` contiguous chunks whose sizes differ by at most one."""
    return items[len(items) * index // num_chunks : len(items) * (index + 1) // num_chunks]
