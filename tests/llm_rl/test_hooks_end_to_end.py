"""Every hook flag in a whole run, in this process: its effect on what is sampled, trained and logged.

`my_pkg` is made of the examples in docs/customization.md.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hook_functions
import pytest
import torch
from documentation import ROOT, write_modules
from transformers import AutoModelForCausalLM

from llm_rl.presets.recipes import tiny_grpo
from llm_rl.presets.tiny import write_sums
from llm_rl.sample import Sample
from llm_rl.train import train
from shared_runtime.rollout.recording import load_recording
from shared_runtime.rollout.types import RolloutError
from shared_runtime.sample import Status

PROMPTS, GROUP, LENGTH = 4, 4, 8
EOS = 2


@dataclass
class Run:
    """A finished run: its rows of metrics by step, and the groups of each rollout as they were recorded."""

    directory: Path
    metrics: dict[int, dict[str, float]]
    rollouts: list[list[list[Sample]]]

    def samples(self, rollout_id: int = 0) -> list[Sample]:
        return [sample for group in self.rollouts[rollout_id] for sample in group]


RunHooks = Callable[..., Run]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("sums")).train


@pytest.fixture(scope="module", autouse=True)
def _my_pkg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("examples")
    write_modules(ROOT / "docs" / "customization.md", directory)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path, sums: Path, monkeypatch: pytest.MonkeyPatch) -> RunHooks:
    """Trains the untrained tiny model for two rollouts; keywords are the settings that differ, by group."""
    monkeypatch.chdir(tmp_path)
    template = str(tmp_path / "rollouts" / "{rollout_id}.jsonl")

    def run_(**changes: dict[str, Any]) -> Run:
        settings: dict[str, dict[str, Any]] = {
            "run": {"in_process": True, "runs_dir": tmp_path / "runs"},
            "model": {"hf_checkpoint": tiny_model_dir},
            "data": {"prompt_data": f"{sums}@[0:64]", "rollout_shuffle": False},
            "batch": {
                "num_rollout": 2,
                "rollout_batch_size": PROMPTS,
                "n_samples_per_prompt": GROUP,
                "num_steps_per_rollout": 1,
            },
            "sampling": {"rollout_max_response_len": LENGTH},
            "evaluation": {"eval_prompt_data": (), "eval_interval": None, "eval_target": None},
            "reward": {"rm_type": "random"},
            "checkpoint": {"save_interval": None, "save_hf": None},
            "tracking": {"progress": "none"},
            "debug": {"save_debug_rollout_data": template},
        }
        for name, values in changes.items():
            settings[name] = settings.get(name, {}) | values
        config = tiny_grpo().config
        config = dataclasses.replace(
            config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in settings.items()}
        )
        result = train(config)
        rows = [json.loads(line) for line in result.metrics_path.read_text().splitlines()]
        rollouts = [load_recording(template, i, Sample) for i in range(result.loop.rollouts)]
        return Run(result.directory, {row["step"]: row for row in rows}, rollouts)

    return run_


def test_rollouts_lag_between_weight_updates(run: RunHooks) -> None:
    """An update after every third rollout: it and the two behind it are drawn by the same weights."""
    lagging = run(
        model={"update_weights_interval": 3},
        batch={"num_rollout": 5},
        optimizer={"lr": 1e-3, "lr_warmup_iters": 0},
        correction={"use_tis": True, "get_mismatch_metrics": True},
    )
    versions = [{s.weight_version_returned for s in lagging.samples(i)} for i in range(5)]
    assert versions == [{0}, {0}, {0}, {3}, {3}]
    apart = [lagging.metrics[i]["train/train_rollout_logprob_abs_diff"] for i in range(5)]
    assert max(apart[0], apart[3]) < 1e-4 < min(apart[1], apart[2], apart[4])


def mean_log_prob(directory: Path, samples: list[Sample]) -> float:
    """Mean over samples of the mean log-probability of each one's trainable tokens, from a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    means = []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
        drawn = torch.tensor(sample.tokens[sample.prompt_length :])
        log_probs = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        means.append(log_probs[torch.tensor(sample.loss_mask or [1] * len(drawn)) == 1].mean().item())
    return statistics.fmean(means)


# Rewards


def test_reward_in_a_thread_may_be_a_dict(run: RunHooks) -> None:
    done = run(hooks={"custom_rm_path": "my_pkg.rewards.right_and_short"})
    for sample in done.samples(1):
        right = float(sample.response == sample.label)
        assert sample.reward == {"score": right - 0.01 * (len(sample.tokens) - sample.prompt_length), "right": right}
    row = done.metrics[1]
    assert row["rollout/raw_reward"] == pytest.approx(statistics.fmean(s.reward["score"] for s in done.samples(1)))
    assert row["rollout/reward/right_mean"] == statistics.fmean(s.reward["right"] for s in done.samples(1))


def test_reward_key_chooses_what_is_trained_on(run: RunHooks) -> None:
    done = run(hooks={"custom_rm_path": "my_pkg.rewards.right_and_short"}, reward={"reward_key": "right"})
    assert done.metrics[0]["rollout/raw_reward"] == statistics.fmean(s.reward["right"] for s in done.samples())


def test_reward_on_the_event_loop(run: RunHooks) -> None:
    done = run(hooks={"custom_rm_path": "my_pkg.rewards.digits_only"})
    rewards = [sample.reward for sample in done.samples()]
    assert rewards == [float(sample.response.isdigit()) for sample in done.samples()]
    assert 0 < sum(rewards) < len(rewards)


def test_reward_of_a_group(run: RunHooks) -> None:
    done = run(hooks={"custom_rm_path": "my_pkg.rewards.longest_wins"}, reward={"group_rm": True})
    for group in done.rollouts[0]:
        lengths = [sample.response_length for sample in group]
        assert [sample.reward for sample in group] == [float(length == max(lengths)) for length in lengths]


def test_reward_built_on_a_built_in_one(run: RunHooks) -> None:
    done = run(hooks={"custom_rm_path": "my_pkg.rewards.math_with_a_penalty_for_truncation"})
    for sample in done.samples():
        truncated = len(sample.tokens) - sample.prompt_length == LENGTH and sample.tokens[-1] != EOS
        assert sample.reward == float(sample.response == sample.label) - 0.5 * truncated


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "RuntimeError: the grader is gone"),
        ("raises_async", "RuntimeError: the grader is gone"),
        ("not_a_number", "it is nan, not a finite number"),
        ("not_a_number_in_a_group", "it is nan, not a finite number"),
    ],
)
def test_reward_that_fails_stops_the_run_or_is_dropped(
    run: RunHooks, tmp_path: Path, function: str, words: str
) -> None:
    hooks = {"custom_rm_path": f"hook_functions.{function}"}
    group_rm = function.endswith("_group")
    with pytest.raises(RolloutError, match=r"sample 5 \(group 1") as error:
        run(hooks=hooks, reward={"group_rm": group_rm})
    assert words in str(error.value)
    assert "--on-reward-error drop" in str(error.value)
    (state,) = tmp_path.glob("runs/*/state.json")
    assert json.loads(state.read_text())["status"] == "failed"

    done = run(hooks=hooks, reward={"group_rm": group_rm, "on_reward_error": "drop"})
    assert done.metrics[0]["rollout/dropped_samples"] == 1
    assert done.metrics[1]["rollout/dropped_samples"] == 0
    assert [sample.index for sample in done.rollouts[0][1]] == [4, 6, 7]
    assert done.metrics[0]["train/grad_norm"] > 0


def test_rewards_relative_to_the_batch(run: RunHooks) -> None:
    done = run(
        hooks={
            "custom_rm_path": "hook_functions.by_group",
            "custom_reward_post_process_path": "my_pkg.shaping.over_the_batch",
            "custom_loss_function_path": "hook_functions.report_rows",
        },
        algorithm={"loss_type": "custom_loss"},
    )
    variance = statistics.pvariance([sample.reward for sample in done.samples()])
    assert done.metrics[0]["train/mean_square_reward"] == pytest.approx(variance)
    assert done.metrics[0]["rollout/raw_reward"] == 0.5


# Filters


@pytest.mark.parametrize(
    ("path", "easy", "hard"),
    [
        ("my_pkg.filters.neither_easy_nor_hopeless", "too_easy", "too_hard"),
        ("shared_runtime.rollout.filters.check_reward_nonzero_std", "zero_std_1", "zero_std_0"),
    ],
)
def test_rejected_groups_are_replaced(run: RunHooks, tmp_path: Path, path: str, easy: str, hard: str) -> None:
    done = run(
        hooks={
            "custom_rm_path": "hook_functions.by_group",
            "dynamic_sampling_filter_path": path,
            "rollout_all_samples_process_path": "my_pkg.filters.write_down",
        }
    )
    assert [group[0].group_index for group in done.rollouts[0]] == [2, 3, 4, 5]
    assert done.metrics[0][f"rollout/dynamic_filter/drop_{easy}"] == 1
    assert done.metrics[0][f"rollout/dynamic_filter/drop_{hard}"] == 1
    assert done.metrics[0]["rollout/raw_reward"] == 0.5
    seen = [json.loads(line) for line in (tmp_path / "rejected_too.jsonl").read_text().splitlines()]
    assert seen[:2] == [[1.0] * GROUP, [0.0] * GROUP]
    assert len(seen) == 2 * PROMPTS + 2


def test_samples_left_out_of_the_loss_stay_in_the_denominator(run: RunHooks) -> None:
    done = run(
        hooks={
            "rollout_sample_filter_path": "my_pkg.filters.leave_out_truncated",
            "custom_reward_post_process_path": "hook_functions.always_two",
        }
    )
    out = [s.status is Status.TRUNCATED for s in done.samples()]
    assert [sample.remove_sample for sample in done.samples()] == out
    assert 0 < sum(out) < len(out)
    assert done.metrics[0]["rollout/removed_samples"] == sum(out)
    # Every advantage is 2 and every ratio 1, so each trained sample's mean loss is -2.
    assert done.metrics[0]["train/pg_loss"] == pytest.approx(-2 * (len(out) - sum(out)) / len(out))


def test_buffer_filter_chooses_what_waits(run: RunHooks) -> None:
    over = {"over_sampling_batch_size": 3 * PROMPTS}
    waited = run(batch=over)
    assert [group[0].group_index for group in waited.rollouts[1]] == [4, 5, 6, 7]
    latest = run(batch=over, hooks={"buffer_filter_path": "my_pkg.filters.last_in_first_out"})
    assert [group[0].group_index for group in latest.rollouts[0]] == [0, 1, 2, 3]
    assert [group[0].group_index for group in latest.rollouts[1]] == [8, 9, 10, 11]


# Generation


def test_generation_in_the_older_form(run: RunHooks, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"max_tokens": 2} if i % 2 else {}} for i in range(8)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        data={"prompt_data": str(prompts)},
        hooks={"custom_generate_function_path": "my_pkg.generation.as_long_as_the_row_says"},
    )
    short = [sample.response_length for sample in done.samples() if "max_tokens" in sample.metadata]
    long = [sample.response_length for sample in done.samples() if "max_tokens" not in sample.metadata]
    assert len(short) == len(long)
    assert max(short) == 2
    assert max(long) > 2


def test_generation_is_told_of_evaluations(run: RunHooks, sums: Path) -> None:
    hook_functions.EVALUATIONS.clear()
    run(
        hooks={"custom_generate_function_path": "hook_functions.note_evaluation"},
        evaluation={"eval_prompt_data": ("sums", f"{sums}@[0:3]")},
    )
    training = [False] * PROMPTS * GROUP
    assert [True] * 3 + training + training + [True] * 3 == hook_functions.EVALUATIONS


def test_what_tools_say_stays_out_of_the_loss(run: RunHooks, tiny_model_dir: Path) -> None:
    hooks = {"custom_generate_function_path": "my_pkg.generation.with_calculator"}
    sampling = {"rollout_max_response_len": 24}
    done = run(hooks=hooks, sampling=sampling)
    answered = [sample for sample in done.samples() if sample.loss_mask is not None]
    assert answered
    for sample in answered:
        response = sample.tokens[sample.prompt_length :]
        assert len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == len(response)
        said = [token for token, kept in zip(response, sample.loss_mask or [], strict=True) if not kept]
        assert said
        assert all(3 <= token <= 12 for token in said), "the calculator says digits"
        assert all(
            (log_prob == 0) == (not kept)
            for log_prob, kept in zip(sample.rollout_log_probs or [], sample.loss_mask or [], strict=True)
        )
    # Later turns are conditioned on the same token ids in the engine and in the trainer.
    assert done.metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5

    measured = run(
        hooks=hooks | {"custom_loss_function_path": "my_pkg.loss.reinforce"},
        sampling=sampling,
        algorithm={"loss_type": "custom_loss"},
    )
    assert measured.rollouts[0] == done.rollouts[0]
    expected = mean_log_prob(tiny_model_dir, done.samples())
    assert measured.metrics[0]["train/mean_log_prob"] == pytest.approx(expected, abs=1e-5)


# Prompts, and a whole rollout


def test_data_source_goes_on_where_a_checkpoint_was_taken(run: RunHooks) -> None:
    data = {"prompt_data": None, "data_source_path": "my_pkg.data.EndlessSums"}
    first = run(data=data, batch={"num_rollout": 1})
    assert [group[0].prompt for group in first.rollouts[0]] == ["0+0=", "1+1=", "2+2=", "3+3="]
    resumed = run(data=data, batch={"num_rollout": 2})
    assert resumed.directory == first.directory
    assert [group[0].prompt for group in resumed.rollouts[1]] == ["4+4=", "5+5=", "6+6=", "7+7="]
    assert [sample.index for sample in resumed.samples(1)] == list(range(16, 32))
    assert resumed.metrics[0] == first.metrics[0]


def test_rollout_and_evaluation_functions(run: RunHooks, sums: Path) -> None:
    done = run(
        hooks={
            "rollout_function_path": "my_pkg.rollout.generate_rollout",
            "eval_function_path": "my_pkg.rollout.evaluate",
        },
        evaluation={"eval_prompt_data": ("sums", f"{sums}@[0:3]")},
    )
    assert done.metrics[0]["rollout/prompts"] == PROMPTS
    for sample in done.samples():
        assert sample.reward == float(len(set(sample.response)) == len(sample.response))
    assert [group[0].group_index for group in done.rollouts[1]] == [4, 5, 6, 7]
    assert done.metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert done.metrics[-1] == {"step": -1, "eval/by_hand": 0.5}
    assert done.metrics[1]["eval/by_hand"] == 0.5


# Training


def test_rows_of_ones_own(run: RunHooks) -> None:
    done = run(
        hooks={
            "custom_rm_path": "hook_functions.by_group",
            "custom_convert_samples_to_train_data_path": "my_pkg.rows.only_the_first_half",
            "custom_loss_function_path": "hook_functions.report_rows",
        },
        algorithm={"loss_type": "custom_loss"},
    )
    halves = [(sample.response_length + 1) // 2 for sample in done.samples()]
    assert done.metrics[0]["train/response_tokens"] == sum(halves)
    # Two groups of equal rewards give 0; in the other two ±½ is divided by the unbiased std √(1/3).
    assert done.metrics[0]["train/mean_square_reward"] == pytest.approx(0.5 * 0.25 / (1 / 3), rel=1e-5)


def test_loss_of_ones_own(run: RunHooks, tiny_model_dir: Path) -> None:
    done = run(
        hooks={
            "custom_reward_post_process_path": "hook_functions.always_two",
            "custom_loss_function_path": "my_pkg.loss.reinforce",
        },
        algorithm={"loss_type": "custom_loss"},
    )
    expected = mean_log_prob(tiny_model_dir, done.samples())
    assert done.metrics[0]["train/mean_log_prob"] == pytest.approx(expected, abs=1e-5)
    assert done.metrics[0]["train/loss"] == pytest.approx(-2 * expected, abs=2e-5)
    assert done.metrics[0]["train/grad_norm"] > 0


def test_reducer_of_ones_own(run: RunHooks) -> None:
    done = run(
        hooks={
            "custom_reward_post_process_path": "hook_functions.always_two",
            "custom_pg_loss_reducer_function_path": "my_pkg.loss.dr_grpo",
        }
    )
    lengths = [sample.response_length for sample in done.samples()]
    assert done.metrics[0]["train/pg_loss"] == pytest.approx(-2 * sum(lengths) / LENGTH / len(lengths))


# Logs and recordings


def test_log_functions_add_metrics(run: RunHooks, sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(
        hooks={
            "custom_rollout_log_function_path": "my_pkg.logs.log_rollout_data",
            "custom_eval_rollout_log_function_path": "my_pkg.logs.log_eval_rollout_data",
        },
        evaluation={"eval_prompt_data": ("sums", f"{sums}@[0:3]")},
    )
    distinct = len({sample.response for sample in done.samples()})
    assert done.metrics[0]["rollout/distinct_responses"] == distinct
    assert "rollout/raw_reward" in done.metrics[0]
    assert "eval/sums/truncated_ratio" in done.metrics[1]
    printed = [line for line in capsys.readouterr().out.splitlines() if "scored" in line]
    assert printed == ["sums after rollout -1: 3 scored", "sums after rollout 1: 3 scored"]


def test_log_functions_leave_the_default_out(run: RunHooks, sums: Path) -> None:
    done = run(
        hooks={
            "custom_rollout_log_function_path": "hook_functions.log_alone",
            "custom_eval_rollout_log_function_path": "hook_functions.log_eval_alone",
        },
        evaluation={"eval_prompt_data": ("sums", f"{sums}@[0:3]")},
    )
    assert not [name for name in done.metrics[0] if name.startswith("rollout/")]
    assert {"perf/rollout_time", "train/loss"} <= done.metrics[0].keys()
    assert done.metrics[-1].keys() == {"step", "eval/sums"}


def test_recorded_rollouts_train_alike(run: RunHooks, tmp_path: Path) -> None:
    recorded = run(hooks={"custom_rm_path": "hook_functions.by_group"})
    kept = shutil.copytree(tmp_path / "rollouts", tmp_path / "kept")
    replayed = run(
        hooks={"custom_rm_path": "hook_functions.by_group"},
        debug={"load_debug_rollout_data": str(kept / "{rollout_id}.jsonl")},
    )
    assert replayed.rollouts == recorded.rollouts
    for step in (0, 1):
        for name in ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "rollout/raw_reward"):
            assert replayed.metrics[step][name] == pytest.approx(recorded.metrics[step][name], rel=1e-6), name


def test_rollouts_without_a_trainer(run: RunHooks) -> None:
    done = run(debug={"debug_rollout_only": True})
    assert len(done.rollouts) == 2
    assert not [name for name in done.metrics[0] if name.startswith("train/")]
    assert done.rollouts[0] != done.rollouts[1]
