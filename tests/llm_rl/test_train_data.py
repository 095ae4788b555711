"""Samples to training rows: group statistics, masks, versions, and the user's conversions."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from llm_rl.sample import Sample
from llm_rl.train_data import reward_normalization, samples_to_rows


def sample(index: int, group: int, reward: Any, length: int = 3, **fields: Any) -> Sample:
    return Sample(
        index=index,
        group_index=group,
        reward=reward,
        prompt="q",
        tokens=list(range(10, 12 + length)),
        prompt_length=2,
        rollout_log_probs=[-0.1 * i for i in range(length)],
        **fields,
    )


def rewards(groups: list[list[Sample]], **options: Any) -> list[float]:
    return [row["reward"] for row in samples_to_rows(groups, **options)]


def test_row_of_a_sample() -> None:
    (row,) = samples_to_rows([[sample(7, 0, 1.0, loss_mask=[1, 0, 1], weight_version_returned=4)]])
    assert row["tokens"].tolist() == [10, 11, 12, 13, 14]  # type: ignore[attr-defined]
    assert row["tokens"].dtype == np.int64  # type: ignore[attr-defined]
    assert row["loss_mask"].tolist() == [1.0, 0.0, 1.0]  # type: ignore[attr-defined]
    assert row["rollout_log_probs"].dtype == np.float32  # type: ignore[attr-defined]
    assert (row["response_length"], row["sample_index"], row["weight_version"]) == (3, 7, 4)
    assert row["raw_reward"] == 1.0


def test_group_normalisation_of_unequal_groups() -> None:
    """Group 0 lost one of four members to a failed reward: its statistics are those of the three that are left."""
    groups = [
        [sample(0, 0, 1.0), sample(1, 0, 0.0), sample(3, 0, 0.0)],
        [sample(i, 1, 0.9) for i in range(4, 8)],
        [sample(8, 2, 2.0), sample(9, 2, 4.0)],
    ]
    mean, std = 1 / 3, statistics.stdev([1.0, 0.0, 0.0])
    expected = [(r - mean) / (std + 1e-6) for r in (1.0, 0.0, 0.0)] + [0.0] * 4
    expected += [(r - 3.0) / (2**0.5 + 1e-6) for r in (2.0, 4.0)]
    assert rewards(groups) == pytest.approx(expected, abs=1e-12)
    assert rewards(groups)[3:7] == [0.0] * 4
    assert rewards(groups, normalization="center")[7:] == [-1.0, 1.0]
    assert rewards(groups, normalization="leave_one_out")[:3] == pytest.approx([1.0, -0.5, -0.5])
    assert rewards(groups, normalization="none")[:3] == [1.0, 0.0, 0.0]
    assert [row["raw_reward"] for row in samples_to_rows(groups)][:4] == [1.0, 0.0, 0.0, 0.9]


def test_dict_rewards() -> None:
    groups = [[sample(0, 0, {"score": 1.0, "acc": 0}), sample(1, 0, {"score": -1.0, "acc": 1})]]
    assert rewards(groups, normalization="center") == [1.0, -1.0]
    assert rewards(groups, normalization="center", reward_key="acc") == [-0.5, 0.5]
    with pytest.raises(ValueError, match="sample 0: reward has no key 'fun'"):
        rewards(groups, reward_key="fun")


def test_removed_samples_count_in_the_statistics_and_train_nothing() -> None:
    groups = [[sample(0, 0, 1.0, remove_sample=True, loss_mask=[1, 1, 0]), sample(1, 0, 0.0)]]
    rows = samples_to_rows(groups, normalization="center")
    assert [row["reward"] for row in rows] == [0.5, -0.5]
    assert rows[0]["loss_mask"].tolist() == [0.0, 0.0, 0.0]  # type: ignore[attr-defined]
    assert rows[1]["loss_mask"].tolist() == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]


def test_a_response_across_an_update_has_the_older_version() -> None:
    (row,) = samples_to_rows([[sample(0, 0, 1.0, weight_version_dispatched=3, weight_version_returned=5)]])
    assert row["weight_version"] == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"loss_mask": [1]}, r"sample 5 \(group 0, prompt 'q'\): 1 entries in loss_mask for 3 response tokens"),
        ({"length": 0}, "2 prompt and 0 response tokens"),
    ],
)
def test_parts_that_do_not_fit_name_the_sample(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        samples_to_rows([[sample(5, 0, 1.0, **fields)]])


def test_estimators() -> None:
    assert reward_normalization("grpo") == "std"
    assert reward_normalization("grpo", disable_std=True) == "center"
    assert reward_normalization("reinforce_plus_plus_baseline") == "center"
    assert reward_normalization("reinforce_plus_plus", disable_std=True) == "none"
    assert reward_normalization("rloo") == "leave_one_out"


def test_custom_post_processing() -> None:
    groups = [[sample(0, 0, 1.0), sample(1, 0, 0.0)]]

    def shaped(args: Any, samples: list[Sample]) -> Any:
        assert args == "args"
        return [s.reward for s in samples], [s.index * 10 for s in samples]

    rows = samples_to_rows(groups, post_process=shaped, args="args")
    assert [(row["raw_reward"], row["reward"]) for row in rows] == [(1.0, 0.0), (0.0, 10.0)]
    for bad in ([1.0, 2.0, 3.0], ([1.0], [1.0]), ([1.0, 0.0], [float("nan"), 0.0])):
        with pytest.raises(ValueError, match="--custom-reward-post-process-path returned"):
            samples_to_rows(groups, post_process=lambda args, samples, bad=bad: bad)


def test_custom_conversion() -> None:
    groups = [[sample(0, 0, 1.0), sample(1, 0, 0.0)]]

    def convert(args: Any, samples: list[Sample]) -> dict[str, Any]:
        return {
            "tokens": [s.tokens for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "rewards": [2.0, 3.0],
            "loss_masks": [[1, 1, 0], [0, 1, 1]],
            "metadata": [None, None],
        }

    rows = samples_to_rows(groups, convert=convert)
    assert [row["reward"] for row in rows] == [2.0, 3.0]
    assert rows[0]["tokens"].dtype == np.int64  # type: ignore[attr-defined]
    assert rows[1]["loss_mask"].tolist() == [0.0, 1.0, 1.0]  # type: ignore[attr-defined]
    assert "rollout_log_probs" not in rows[0]
    built = samples_to_rows(groups)
    assert samples_to_rows(groups, convert=lambda args, samples: built) == built


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (3, "returned int"),
        ({"tokens": [[1]]}, "lacks response_lengths, rewards; it has tokens"),
        ({"tokens": [[1]], "response_lengths": [1], "rewards": [1.0, 2.0]}, "tokens has 1 entries, rewards has 2"),
        ({"tokens": [], "response_lengths": [], "rewards": []}, "no row is left of 1 samples"),
    ],
)
def test_custom_conversion_that_does_not_fit(result: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"--custom-convert-samples-to-train-data-path.*{expected}"):
        samples_to_rows([[sample(0, 0, 1.0)]], convert=lambda args, samples: result)
