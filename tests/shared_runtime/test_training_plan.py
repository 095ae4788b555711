"""Planning: every row once, equal numbers of micro-batches, budgets kept, global counts."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_runtime.training.partition import balanced_bins, first_fit_decreasing, karmarkar_karp
from shared_runtime.training.plan import StepPlan, plan_rollout, split_micro_batches, split_ranks, split_steps


@st.composite
def problems(draw):
    """Rows of samples, some samples in several rows, with a layout that fits."""
    rows_per_sample = draw(st.lists(st.integers(1, 3), min_size=1, max_size=24))
    sample_ids = [s for s, n in enumerate(rows_per_sample) for _ in range(n)]
    lengths = draw(st.lists(st.integers(1, 50), min_size=len(sample_ids), max_size=len(sample_ids)))
    trainable = [draw(st.integers(0, length)) for length in lengths]
    return {
        "lengths": lengths,
        "sample_ids": sample_ids,
        "trainable_tokens": trainable,
        "dp_size": draw(st.integers(1, 5)),
        "num_steps": draw(st.integers(1, len(rows_per_sample))),
        "micro_batch_size": draw(st.integers(1, 4)),
        "max_tokens_per_gpu": draw(st.none() | st.integers(max(lengths), 120)),
        "balance_data": draw(st.booleans()),
    }


@settings(max_examples=300, deadline=None)
@given(problems())
def test_plan_invariants(problem):
    rows = [{"row": i} for i in range(len(problem["lengths"]))]
    plans = plan_rollout(rows, **problem)

    assert len(plans) == problem["dp_size"]
    assert all(len(plan) == problem["num_steps"] for plan in plans)
    trained = [step.rows[i]["row"] for plan in plans for step in plan for mb in step.micro_batches for i in mb]
    assert sorted(trained) == list(range(len(rows)))  # every row exactly once

    step_of_sample = {}
    for index, shares in enumerate(zip(*plans, strict=True)):
        assert len({len(share.micro_batches) for share in shares}) == 1
        ids = [row["row"] for share in shares for row in share.rows]
        samples = {problem["sample_ids"][i] for i in ids}
        for sample in samples:
            assert step_of_sample.setdefault(sample, index) == index  # a sample is never divided over steps
        tokens = sum(problem["trainable_tokens"][i] for i in ids)
        for share in shares:
            assert share.global_num_samples == len(samples)
            assert share.global_num_tokens == tokens
            for row, count in zip(share.rows, share.sample_num_tokens, strict=True):
                sample = problem["sample_ids"][row["row"]]
                assert count == sum(
                    t for t, s in zip(problem["trainable_tokens"], problem["sample_ids"], strict=True) if s == sample
                )
            for micro_batch in share.micro_batches:
                cost = sum(problem["lengths"][share.rows[i]["row"]] for i in micro_batch)
                if problem["max_tokens_per_gpu"] is None:
                    assert len(micro_batch) <= problem["micro_batch_size"]
                else:
                    assert cost <= problem["max_tokens_per_gpu"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_karmarkar_karp_against_the_optimum(weights, parts):
    found = karmarkar_karp(weights, parts)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(weights)))
    best = min(
        max(sum(w for w, p in zip(weights, assignment, strict=True) if p == part) for part in range(parts))
        for assignment in itertools.product(range(parts), repeat=len(weights))
    )
    # The bound of longest-first scheduling, 4/3 - 1/(3k), holds for the largest differencing method too.
    assert max(sum(weights[i] for i in part) for part in found) <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9


def test_karmarkar_karp_textbook_example():
    # 8, 7, 6, 5, 4 over two parts: the differencing method leaves a difference of 2 (Korf 1998).
    found = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in found) == [14, 16]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_equal_size_partition_differs_by_one_row(weights, parts):
    sizes = [len(part) for part in karmarkar_karp(weights, parts, equal_size=True)]
    assert sum(sizes) == len(weights)
    assert max(sizes) - min(sizes) <= 1


def test_balance_data_evens_out_tokens():
    lengths = [1000, 10, 10, 10, 990, 10, 10, 10]
    plain = [sum(lengths[i] for i in part) for part in split_ranks(lengths, 2)]
    balanced = [sum(lengths[i] for i in part) for part in split_ranks(lengths, 2, balance_data=True, equal_size=True)]
    assert plain == [1030, 1020]
    assert max(balanced) - min(balanced) <= 10
    skewed = [500, 500, 500, 500, 1, 1, 1, 1]
    balanced = [sum(skewed[i] for i in part) for part in split_ranks(skewed, 2, balance_data=True, equal_size=True)]
    assert balanced == [1002, 1002]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 100))
def test_first_fit_decreasing_keeps_the_capacity_and_wastes_less_than_half(weights, capacity):
    bins = first_fit_decreasing(weights, capacity)
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(weights)))
    filled = [sum(weights[i] for i in b) for b in bins]
    assert all(f <= capacity for f in filled)
    assert len(bins) <= 2 * sum(weights) / capacity + 1


def test_balanced_bins_falls_back_to_tight_packing():
    # Differencing gives 7 and 9; within 8 only the tight packing {4, 4}, {3, 3, 2} fits.
    assert sorted(map(sorted, balanced_bins([4, 4, 3, 3, 2], 2, 8))) == [[0, 1], [2, 3, 4]]
    with pytest.raises(ValueError, match="need 2 bins"):
        balanced_bins([5, 5], 1, 8)


def test_ranks_without_rows_get_empty_micro_batches():
    assert split_micro_batches([[3, 3, 3], []], micro_batch_size=2) == [[[0, 1], [2]], [[], []]]
    assert split_micro_batches([[5], [5, 5, 5]], max_tokens_per_gpu=10) == [[[0], []], [[1, 2], [0]]]
    assert split_micro_batches([[], []], max_tokens_per_gpu=10) == [[[]], [[]]]


def test_steps_keep_samples_together_and_in_order():
    assert split_steps(["a", "b", "a", "c", "d"], global_batch_size=2) == [[0, 1, 2], [3, 4]]
    assert split_steps([0, 1, 2, 3, 4], num_steps=2) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens_per_gpu": 4}, r"row 1 \(sample s1\) has 5 tokens, more than --max-tokens-per-gpu 4"),
        ({"num_steps": 3}, "2 samples can't fill --num-steps-per-rollout 3"),
        ({"num_steps": None, "global_batch_size": 3}, "2 samples are no multiple of --global-batch-size 3"),
        ({"global_batch_size": 2}, "either num_steps or global_batch_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"lengths": [3]}, "2 rows, 1 lengths"),
    ],
)
def test_bad_input(change, message):
    arguments = {
        "rows": [{}, {}],
        "lengths": [3, 5],
        "sample_ids": ["s0", "s1"],
        "trainable_tokens": [1, 1],
        "dp_size": 1,
        "num_steps": 1,
    }
    with pytest.raises(ValueError, match=message):
        plan_rollout(**(arguments | change))


def test_a_plan_knows_the_tokens_of_every_row():
    with pytest.raises(ValueError, match="sample_num_tokens"):
        StepPlan(rows=[{}], micro_batches=[[0]], global_num_samples=1, global_num_tokens=1)
