"""The data source: epochs, order, buffer, and a state that is exact to the sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared_runtime.data import DataError, PromptDataset, PromptRow, RolloutDataSource
from shared_runtime.sample import BaseSample, Status

Source = RolloutDataSource[BaseSample]


def make(num_prompts: int = 7, **options: Any) -> Source:
    rows = [PromptRow(f"p{i}", i, {"row": i}) for i in range(num_prompts)]
    options = {"n_samples_per_prompt": 2, "shuffle": True, "seed": 3, **options}
    return RolloutDataSource(PromptDataset(rows), BaseSample, **options)


def labels(groups: list[list[BaseSample]]) -> list[int]:
    return [group[0].label for group in groups]


def test_groups_and_global_counters() -> None:
    source = make(n_samples_per_prompt=3, shuffle=False)
    source.get_samples(2)
    groups = source.get_samples(2)
    assert [[s.index for s in group] for group in groups] == [[6, 7, 8], [9, 10, 11]]
    assert [[s.group_index for s in group] for group in groups] == [[2] * 3, [3] * 3]
    assert labels(groups) == [2, 3]
    assert len({id(s.metadata) for group in groups for s in group}) == 6


def test_every_epoch_has_every_prompt_once_in_its_own_order() -> None:
    source = make()
    drawn = [label for size in (3, 5, 6, 7) for label in labels(source.get_samples(size))]
    epochs = [drawn[:7], drawn[7:14], drawn[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    one, other = make(), make()
    assert labels(one.get_samples(14)) == [label for _ in range(14) for label in labels(other.get_samples(1))]
    assert labels(make(50).get_samples(50)) != labels(make(50, seed=4).get_samples(50))
    assert labels(make(50, shuffle=False).get_samples(50)) == list(range(50))


def roundtrip(source: Source, tmp_path: Path) -> Source:
    source.save(tmp_path)
    json.loads((tmp_path / "data_source.json").read_text())
    fresh = make()
    fresh.load(tmp_path)
    return fresh


@pytest.mark.parametrize("drawn", range(16))
def test_resume_is_exact_to_the_sample(drawn: int, tmp_path: Path) -> None:
    """Any point, an epoch's end (7, 14) included: the next groups are those of an uninterrupted run."""
    source = make()
    source.get_samples(drawn)
    resumed = roundtrip(source, tmp_path)
    assert resumed.get_samples(20) == source.get_samples(20)


def test_resume_at_an_epochs_end_starts_the_next_epoch(tmp_path: Path) -> None:
    source = make()
    first = labels(source.get_samples(7))
    second = labels(roundtrip(source, tmp_path).get_samples(7))
    assert sorted(first) == sorted(second) == list(range(7))
    assert second != first


def test_buffer_comes_first_and_survives(tmp_path: Path) -> None:
    source = make()
    groups = source.get_samples(4)
    source.add_samples([groups[2], groups[1]])
    groups[1][0].status = Status.TRUNCATED
    groups[1][0].metadata["turns"] = [1, {"a": None}]
    groups[1][0].reward = 0.0
    resumed = roundtrip(source, tmp_path)
    assert resumed.get_samples(1) == [groups[2]]
    (restored,) = resumed.get_samples(1)
    assert restored == groups[1]
    assert restored[0].status is Status.TRUNCATED
    assert restored[0].reward == 0.0
    assert resumed.get_samples(2) == make_and_skip(4).get_samples(2)


def make_and_skip(count: int) -> Source:
    source = make()
    source.get_samples(count)
    return source


def test_buffer_filter_chooses() -> None:
    calls: list[tuple[object, int | None, int, int]] = []

    def newest(args: Any, rollout_id: int | None, buffer: list[list[BaseSample]], num_samples: int) -> Any:
        calls.append((args, rollout_id, len(buffer), num_samples))
        return [buffer.pop()]

    source = make(buffer_filter=newest, args="args")
    groups = source.get_samples(3)
    source.add_samples(groups)
    source.rollout_id = 5
    taken = source.get_samples(2)
    assert taken[0] is groups[2]
    assert taken[1][0].group_index == 3
    assert calls == [("args", 5, 3, 2)]
    assert source.buffer == groups[:2]


def test_buffer_filter_that_takes_too_much() -> None:
    source = make(buffer_filter=lambda args, rollout_id, buffer, num_samples: list(buffer))
    source.add_samples(source.get_samples(3))
    with pytest.raises(ValueError, match="--buffer-filter-path returned 3 groups, asked for 1"):
        source.get_samples(1)


@pytest.mark.parametrize(
    ("other", "flag"),
    [
        (lambda: make(8), "--prompt-data"),
        (lambda: make(seed=4), "--rollout-seed"),
        (lambda: make(shuffle=False), "--rollout-shuffle"),
    ],
)
def test_state_of_another_run_is_refused(other: Callable[[], Source], flag: str) -> None:
    with pytest.raises(DataError, match=flag):
        other().load_state_dict(make().state_dict())


def test_checkpoint_without_state(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_source.json: the checkpoint has no state"):
        make().load(tmp_path)


def test_a_sample_that_is_no_json_is_named() -> None:
    source = make()
    groups = source.get_samples(2)
    groups[1][1].metadata["latents"] = {1j}
    source.add_samples(groups)
    with pytest.raises(TypeError, match="sample 3: field 'metadata'"):
        source.state_dict()
