"""The tracker: what non-finite values and failing sinks do to a run."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from shared_runtime.hooks import HookError
from shared_runtime.tracking import LogHooks, Sink, Tracker, TrackingError
from shared_runtime.tracking.jsonl import JsonlSink, read_rows
from shared_runtime.tracking.keys import eval_scores


class Broken(Sink):
    """An optional sink whose service is down."""

    name = "broken"

    def log(self, step, metrics):
        raise ConnectionError("no route to host")

    def close(self):
        raise ConnectionError("still none")


class BrokenRecord(Broken):
    name = "record"
    required = True


def test_non_finite_values_are_null_and_counted(tmp_path, caplog):
    tracker = Tracker([JsonlSink(tmp_path / "metrics.jsonl")])
    with caplog.at_level(logging.WARNING):
        tracker.log(0, {"a": 1.0, "b": math.nan, "c": -math.inf})
        tracker.log(1, {"a": math.inf, "b": math.nan})
        tracker.log(2, {"a": 1.0})
    tracker.close()
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [
        {"step": 0, "a": 1.0, "b": None, "c": None, "tracking/non_finite": 2},
        {"step": 1, "a": None, "b": None, "tracking/non_finite": 2},
        {"step": 2, "a": 1.0},
    ]
    # Each key is warned of once, not at every step.
    assert [record.getMessage() for record in caplog.records] == [
        "step 0: not finite, logged as null: b, c",
        "step 1: not finite, logged as null: a",
    ]


@pytest.mark.parametrize("value", [np.float32(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor([0.25]), 0.25])
def test_scalars_of_any_library_are_numbers(tmp_path, value):
    with Tracker([JsonlSink(tmp_path / "metrics.jsonl")]) as tracker:
        tracker.log(0, {"a": value, "n": 3, "flag": True})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":0,"a":0.25,"n":3,"flag":1}\n'


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.zeros(2)])
def test_anything_else_is_an_error_that_names_the_metric(tmp_path, value):
    with Tracker([JsonlSink(tmp_path / "metrics.jsonl")]) as tracker, pytest.raises(TypeError, match="'train/loss'"):
        tracker.log(0, {"train/loss": value})


def test_optional_sink_that_fails_warns_once_and_is_counted(tmp_path, caplog):
    tracker = Tracker([Broken(), JsonlSink(tmp_path / "metrics.jsonl")])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log(step, {"a": step})
        tracker.close()
    assert [row.get("tracking/broken_errors") for row in read_rows(tmp_path / "metrics.jsonl")] == [None, 1, 2]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "logging to broken failed and goes on without it" in messages[0]
    assert "ConnectionError: no route to host" in messages[0]
    assert messages[1] == "broken failed 4 times in this run; metrics.jsonl is complete"


def test_required_sink_that_fails_stops_the_run():
    with pytest.raises(TrackingError, match="record: no route to host"):
        Tracker([BrokenRecord()]).log(0, {"a": 1.0})


def test_close_closes_every_sink_then_raises(tmp_path):
    jsonl = JsonlSink(tmp_path / "metrics.jsonl")
    tracker = Tracker([BrokenRecord(), jsonl])
    with pytest.raises(TrackingError, match="record: still none"):
        tracker.close()
    assert jsonl._metrics._file.closed
    tracker.close()  # a second time is nothing


def test_eval_scores_are_the_sets_only():
    row = {
        "eval/sums": 0.5,
        "eval/aime-2025": 0.1,
        "eval/sums/response_len": 12.0,
        "eval/sums-truncated_ratio": 0.0,
        "eval/lag_steps": 1.0,
        "eval/skipped_busy": 2.0,
        "eval/broken": None,
        "rollout/reward": 1.0,
    }
    assert eval_scores(row) == {"sums": 0.5, "aime-2025": 0.1}


class TestLogHooks:
    def test_true_leaves_the_default_out(self):
        seen = []

        def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
            seen.append((rollout_id, args, list(samples), rollout_time))
            rollout_extra_metrics["mine/reward"] = 2.0
            return True

        extra: dict[str, float] = {}
        hooks = LogHooks(rollout=log_rollout_data, args="config")
        assert hooks.rollout(3, ["s"], extra, 1.5) is True
        assert seen == [(3, "config", ["s"], 1.5)]
        assert extra == {"mine/reward": 2.0}
        assert hooks.evaluation(3, {}, {}) is False

    @pytest.mark.parametrize("result", [False, None])
    def test_false_and_nothing_keep_it(self, result):
        hooks = LogHooks(evaluation=lambda rollout_id, args, data, extra_metrics: result)
        assert hooks.evaluation(0, {"sums": []}, {}) is False

    def test_other_results_are_an_error(self):
        hooks = LogHooks(evaluation=lambda *_: "yes")
        with pytest.raises(TypeError, match="returned a str; return True to leave"):
            hooks.evaluation(0, {}, {})

    def test_functions_are_loaded_and_checked_at_the_door(self, tmp_path, monkeypatch):
        (tmp_path / "my_log_functions.py").write_text(
            "def rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time): return True\n"
            "def evaluation(rollout_id, args, data, extra_metrics): return True\n"
            "def short(rollout_id, samples): return True\n"
            "async def later(rollout_id, args, data, extra_metrics): return True\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        hooks = LogHooks.load("my_log_functions.rollout", "my_log_functions.evaluation")
        assert hooks.rollout(0, [], {}, 0.0)
        assert hooks.evaluation(0, {}, {})
        assert not LogHooks.load(None, None).rollout(0, [], {}, 0.0)
        with pytest.raises(HookError, match=r"--custom-rollout-log-function-path my_log_functions\.short"):
            LogHooks.load("my_log_functions.short", None)
        with pytest.raises(HookError, match=r"--custom-eval-rollout-log-function-path my_log_functions\.later.*async"):
            LogHooks.load(None, "my_log_functions.later")
