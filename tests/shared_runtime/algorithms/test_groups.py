"""Group-relative rewards against numbers computed with the statistics module."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_runtime.algorithms.groups import leave_one_out_rewards, normalize_group_rewards, normalize_rewards


def by_hand(rewards, groups, std_normalization=True):
    members = defaultdict(list)
    for r, g in zip(rewards, groups, strict=True):
        members[g].append(r)
    out = []
    for r, g in zip(rewards, groups, strict=True):
        centred = r - statistics.fmean(members[g])
        std = statistics.stdev(members[g]) if len(members[g]) > 1 else 0.0
        out.append(centred / (std + 1e-6) if std_normalization and std > 0 else centred)
    return out


@pytest.mark.parametrize("std_normalization", [True, False])
def test_uneven_interleaved_groups(std_normalization):
    rewards = [1.0, 0.0, 0.5, 1.0, -3.0, 2.0, 0.25, 7.0]
    groups = ["a", "b", "a", "b", "c", "a", "c", "single"]
    got = normalize_group_rewards(rewards, groups, std_normalization=std_normalization)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_hand(rewards, groups, std_normalization), rtol=1e-12, atol=1e-15)
    assert got[7] == 0.0


def test_the_textbook_group():
    # mean 1/2, unbiased std sqrt(1/3)
    got = normalize_group_rewards([1, 0, 0, 1], [5, 5, 5, 5])
    half = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(got, [half, -half, -half, half], rtol=1e-12)


@pytest.mark.parametrize("value", [0.9, 0.1, -0.7, 1e-30, 1e30, float(np.float32(0.9)), 0.0])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("std_normalization", [True, False])
def test_equal_rewards_give_exactly_zero(value, n, std_normalization):
    got = normalize_group_rewards([value] * n + [1.0, 2.0], [0] * n + [1, 1], std_normalization=std_normalization)
    assert (got[:n] == 0.0).all()
    assert (got[n:] != 0.0).all()


def test_equal_up_to_a_pass_through_float32():
    assert (normalize_group_rewards([0.9, float(np.float32(0.9)), 0.9], [0, 0, 0]) == 0.0).all()


def test_small_but_real_differences_survive():
    got = normalize_group_rewards([1e-5, 2e-5, 3e-5], [0, 0, 0])
    np.testing.assert_allclose(got, [-1e-5 / 1.1e-5, 0.0, 1e-5 / 1.1e-5], rtol=1e-9, atol=1e-12)


def test_rows_of_one_rollout_count_once():
    # Rollout 10 gave three rows: the group is still {1, 0, 0.5}.
    rewards = [1.0, 1.0, 1.0, 0.0, 0.5]
    got = normalize_group_rewards(rewards, [0] * 5, rollout_ids=[10, 10, 10, 11, 12])
    np.testing.assert_allclose(got[[0, 3, 4]], by_hand([1.0, 0.0, 0.5], [0] * 3), rtol=1e-12, atol=1e-15)
    assert got[0] == got[1] == got[2]


def test_fan_out_of_a_single_rollout_is_a_group_of_one():
    assert (normalize_group_rewards([3.0, 3.0], [0, 0], rollout_ids=[1, 1]) == 0.0).all()
    assert (leave_one_out_rewards([3.0, 3.0], [0, 0], rollout_ids=[1, 1]) == 0.0).all()


def test_siblings_must_agree():
    with pytest.raises(ValueError, match=r"rows 0 and 2 .* different rewards"):
        normalize_group_rewards([1.0, 0.0, 0.5], [0, 0, 0], rollout_ids=["x", "y", "x"])
    with pytest.raises(ValueError, match=r"rows 0 and 1 .* different groups"):
        normalize_group_rewards([1.0, 1.0, 0.5], [0, 1, 1], rollout_ids=["x", "x", "y"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_reward_names_its_row(bad):
    with pytest.raises(ValueError, match=r"row 2 \(group 7\)"):
        normalize_group_rewards([0.0, 1.0, bad], [3, 3, 7])


def test_mismatched_lengths_and_empty_input():
    with pytest.raises(ValueError, match="2 group ids"):
        normalize_group_rewards([1.0], [0, 0])
    with pytest.raises(ValueError, match="3 rollout ids"):
        normalize_group_rewards([1.0], [0], rollout_ids=[0, 0, 0])
    assert normalize_group_rewards([], []).shape == (0,)


@pytest.mark.parametrize("mean_over", ["group", "batch"])
@pytest.mark.parametrize("std_over", ["group", "batch", None])
@pytest.mark.parametrize("unbiased", [True, False])
def test_independent_scopes(mean_over, std_over, unbiased):
    rewards = np.array([0.3, 0.9, 0.1, 2.0, -1.0, 0.4])
    groups = np.array([0, 0, 0, 1, 1, 1])
    expected = []
    for i, r in enumerate(rewards):
        same = rewards[groups == groups[i]]
        value = r - (same if mean_over == "group" else rewards).mean()
        if std_over is not None:
            value /= (same if std_over == "group" else rewards).std(ddof=1 if unbiased else 0) + 1e-4
        expected.append(value)
    got = normalize_rewards(rewards, groups, mean_over=mean_over, std_over=std_over, eps=1e-4, unbiased=unbiased)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_one_sample_a_group_skips_the_std_of_the_batch():
    got = normalize_rewards([1.0, 3.0, 5.0], [0, 1, 2], mean_over="batch", std_over="batch", eps=1e-4)
    np.testing.assert_allclose(got, [-2.0, 0.0, 2.0], atol=1e-15)


def test_rloo_against_the_mean_of_the_others():
    rewards, groups = [1.0, 0.0, 0.25, 4.0, 2.0, 9.0], [0, 0, 0, 1, 1, 2]
    expected = [1 - 0.125, 0 - 0.625, 0.25 - 0.5, 4 - 2, 2 - 4, 0]
    np.testing.assert_allclose(leave_one_out_rewards(rewards, groups), expected, rtol=1e-12, atol=1e-15)
    assert (leave_one_out_rewards([0.9] * 3, [0] * 3) == 0.0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.9, 1.0, -2.5])), max_size=24), st.randoms())
def test_order_of_rows_does_not_matter(rows, random):
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = normalize_group_rewards(rewards, groups)
    shuffled = normalize_group_rewards([rewards[i] for i in order], [groups[i] for i in order])
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(straight, by_hand(rewards, groups), rtol=1e-9, atol=1e-9)


def test_needs_no_torch():
    code = "import sys, shared_runtime.algorithms.groups; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
