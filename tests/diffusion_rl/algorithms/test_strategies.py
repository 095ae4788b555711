"""Step and timestep strategies, and the advantages."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffusion_rl.algorithms.advantages import diffusion_advantages
from diffusion_rl.algorithms.nft_timesteps import check_steps, drop_final_steps, drop_random_steps
from diffusion_rl.algorithms.step_strategies import (
    block_steps,
    check_strategy,
    epoch_global_random_choice,
    ode_and_return_last,
    sde_window,
    touched_latents,
    window_steps,
)


def test_a_window_is_contiguous_stays_in_range_and_reaches_every_place() -> None:
    starts = Counter()
    for seed in range(400):
        steps = window_steps(10, 3, (2, 8), seed)
        assert steps == list(range(steps[0], steps[0] + 3))
        assert steps[0] >= 2
        assert steps[-1] < 8
        assert steps == window_steps(10, 3, (2, 8), seed)
        starts[steps[0]] += 1
    assert set(starts) == {2, 3, 4, 5}
    assert min(starts.values()) > 60


def test_the_whole_schedule_is_a_window() -> None:
    assert window_steps(10, 10, None, 5) == list(range(10))
    assert window_steps(10, 2, (3, 5), 5) == [3, 4]


@pytest.mark.parametrize(
    ("window", "count", "message"),
    [((0, 11), 3, "0,11"), ((5, 5), 1, "5,5"), ((2, 4), 3, "2 steps"), (None, 0, "between 1"), ((-1, 4), 1, "-1,4")],
)
def test_windows_that_do_not_fit_are_refused_with_the_numbers(window: tuple, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_steps(10, count, window, 0)


def test_a_block_of_groups_shares_its_steps() -> None:
    def choose(group: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(block_steps(10, 2, (1, 3, 5, 7), group_index=group, groups_a_block=4, seed=seed))

    for block in range(20):
        assert len({choose(4 * block + i) for i in range(4)}) == 1
    choices = {choose(4 * block) for block in range(60)}
    assert choices == {(1, 3), (1, 5), (1, 7), (3, 5), (3, 7), (5, 7)}
    assert any(choose(4 * b, seed=0) != choose(4 * b, seed=1) for b in range(10))


@pytest.mark.parametrize(("candidates", "count"), [((), 1), ((1, 1), 1), ((1, 10), 1), ((1, 2), 3)])
def test_bad_candidates_are_refused(candidates: tuple[int, ...], count: int) -> None:
    with pytest.raises(ValueError, match="--diffusion-sde-candidate-steps"):
        block_steps(10, count, candidates, group_index=0, groups_a_block=1, seed=0)


def test_hooks_return_the_latents_that_their_steps_touch() -> None:
    args = SimpleNamespace(
        diffusion_num_sde_steps=2,
        diffusion_sde_window_range=(3, 5),
        diffusion_sde_candidate_steps=(0, 9),
        rollout_batch_size=4,
        rollout_seed=42,
    )
    sample = SimpleNamespace(group_index=3)
    assert sde_window(args, sample, 10, 0) == ([3, 4], [3, 4, 5])
    assert epoch_global_random_choice(args, sample, 10, 0) == ([0, 9], [0, 1, 9, 10])
    assert ode_and_return_last(args, sample, 10, 0) == (None, [10])
    assert touched_latents([]) == []


def test_what_a_strategy_returns_is_checked() -> None:
    assert check_strategy(([4, 3], [5, 3, 4]), 10, "my.hook") == ([3, 4], [3, 4, 5])
    assert check_strategy((None, None), 10, "my.hook") == (None, None)
    for bad, message in [
        (([10], None), r"sde_step_indices \[10\]"),
        (([1, 1], None), "different"),
        ((None, [11]), "return_step_indices"),
        (([3], [3]), r"latents \[4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_strategy(bad, 10, "my.hook")


def test_nft_timesteps() -> None:
    args = SimpleNamespace(diffusion_nft_num_dropped_timesteps=4)
    assert drop_final_steps(args, 10, torch.Generator()) == [0, 1, 2, 3, 4, 5]
    draws = [drop_random_steps(args, 10, torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert all(len(set(draw)) == 6 and set(draw) <= set(range(10)) for draw in draws)
    assert draws[0] == drop_random_steps(args, 10, torch.Generator().manual_seed(0))
    counts = Counter(step for draw in draws for step in draw)
    assert all(90 < counts[step] < 150 for step in range(10))
    args.diffusion_nft_num_dropped_timesteps = 10
    with pytest.raises(ValueError, match="--diffusion-nft-num-dropped-timesteps 10"):
        drop_final_steps(args, 10, torch.Generator())
    assert check_steps([2, 0], 10, "my.hook") == [2, 0]
    for bad in ([], [10], [1, 1]):
        with pytest.raises(ValueError, match=r"my\.hook"):
            check_steps(bad, 10, "my.hook")


REWARDS = np.array([0.0, 1.0, 0.5, 0.5, 0.9, 0.9, 0.3, 0.7])
GROUPS = ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_group_advantages() -> None:
    got = diffusion_advantages(REWARDS, GROUPS)
    for start in range(0, 8, 2):
        pair = REWARDS[start : start + 2]
        expected = (pair - pair.mean()) / (pair.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(got[start : start + 2], expected, atol=1e-12)
    assert got[2:6].tolist() == [0.0] * 4
    population = diffusion_advantages(REWARDS, GROUPS, unbiased=False)
    assert population[1] == pytest.approx(0.5 / (0.5 + 1e-4))


def test_mean_and_std_are_chosen_independently() -> None:
    group_mean = np.repeat(REWARDS.reshape(-1, 2).mean(axis=1), 2)
    std = REWARDS.std(ddof=1)
    np.testing.assert_allclose(
        diffusion_advantages(REWARDS, GROUPS, globalize_std=True), (REWARDS - group_mean) / (std + 1e-4), atol=1e-12
    )
    np.testing.assert_allclose(
        diffusion_advantages(REWARDS, GROUPS, globalize_mean=True, globalize_std=True),
        (REWARDS - REWARDS.mean()) / (std + 1e-4),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        diffusion_advantages(REWARDS, GROUPS, std_normalization=False), REWARDS - group_mean, atol=1e-12
    )


def test_a_group_of_one_is_only_centred() -> None:
    singles = list(range(8))
    assert diffusion_advantages(REWARDS, singles).tolist() == [0.0] * 8
    got = diffusion_advantages(REWARDS, singles, globalize_mean=True, globalize_std=True)
    np.testing.assert_allclose(got, REWARDS - REWARDS.mean(), atol=1e-12)


def test_equal_rewards_that_went_through_float32_give_zero() -> None:
    rewards = [np.float32(0.9), 0.9, float(np.float32(0.9))]
    assert diffusion_advantages(rewards, [0, 0, 0]).tolist() == [0.0] * 3
