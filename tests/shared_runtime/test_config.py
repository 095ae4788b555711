"""The typed config: batch identity, YAML, unknown keys, flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared_runtime.cli import parse
from shared_runtime.config import (
    BatchConfig,
    ConfigError,
    FsdpConfig,
    OptimizerConfig,
    Problems,
    RunConfig,
    flat_args,
    from_dict,
    load_config,
    resolve_batch,
    save_config,
)


@dataclass(frozen=True)
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)


def resolved(**knobs: int) -> BatchConfig:
    problems = Problems()
    batch = resolve_batch(BatchConfig(**knobs), problems)
    problems.raise_if_any()
    return batch


KNOBS = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64, "num_steps_per_rollout": 4}


@pytest.mark.parametrize("missing", [*KNOBS])
def test_any_three_knobs_give_the_fourth(missing: str) -> None:
    batch = resolved(**{name: value for name, value in KNOBS.items() if name != missing})
    assert {name: getattr(batch, name) for name in KNOBS} == KNOBS


def test_defaults_are_one_step_over_all_samples() -> None:
    batch = resolved(rollout_batch_size=6, n_samples_per_prompt=5)
    assert (batch.global_batch_size, batch.num_steps_per_rollout, batch.over_sampling_batch_size) == (30, 1, 6)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (KNOBS | {"global_batch_size": 63}, ["32", "8", "256", "63", "252"]),
        ({"rollout_batch_size": 5, "n_samples_per_prompt": 3, "num_steps_per_rollout": 4}, ["15", "4"]),
        ({"rollout_batch_size": 5, "n_samples_per_prompt": 3, "global_batch_size": 4}, ["15", "4"]),
        ({"n_samples_per_prompt": 8}, ["--rollout-batch-size"]),
        ({"rollout_batch_size": 0}, ["--rollout-batch-size", "above 0"]),
        ({"rollout_batch_size": 4, "over_sampling_batch_size": 2}, ["--over-sampling-batch-size 2", "4"]),
        ({"rollout_batch_size": 4, "use_dynamic_batch_size": True}, ["--max-tokens-per-gpu"]),
    ],
)
def test_knobs_that_do_not_fit_are_refused_with_the_numbers(knobs: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(**knobs)
    for word in words:
        assert word in str(error.value)


def test_every_problem_is_reported_at_once() -> None:
    problems = Problems()
    resolve_batch(BatchConfig(rollout_batch_size=-1, n_samples_per_prompt=-2), problems)
    OptimizerConfig(lr=-1.0, adam_beta1=1.5).check(problems)
    with pytest.raises(ConfigError) as error:
        problems.raise_if_any()
    assert len(error.value.problems) >= 4
    assert "--adam-beta1" in str(error.value)


def test_yaml_round_trip_is_exact(tmp_path: Path) -> None:
    config = Config(
        run=RunConfig(run_name="x", runs_dir=tmp_path), optimizer=OptimizerConfig(lr=3e-7), batch=BatchConfig(**KNOBS)
    )
    save_config(config, tmp_path / "c.yaml")
    assert load_config(Config(), tmp_path / "c.yaml") == config


def test_yaml_number_without_a_dot_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {lr: 1e-6}\n")
    assert load_config(Config(), path).optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"optimizer": {"lrr": 1}}, ["lrr", "'lr'"]),
        ({"optimiser": {}}, ["optimiser", "'optimizer'"]),
        ({"lr": 1}, ["lr", "'optimizer'"]),
        ({"batch": {"lr": 1}}, ["batch: unknown key 'lr'", "'optimizer'"]),
        ({"batch": {"rollout_batch_size": "many"}}, ["rollout_batch_size", "whole number"]),
        ({"batch": {"rollout_batch_size": True}}, ["whole number"]),
        ({"fsdp": {"keep_fp32_master": 1}}, ["true or false"]),
        ({"optimizer": {"optimizer": "lion"}}, ["adam, sgd", "lion"]),
        ({"optimizer": 3}, ["group of settings"]),
    ],
)
def test_wrong_yaml_names_key_and_remedy(data: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(Config(), data, source="c.yaml")
    for word in ["c.yaml", *words]:
        assert word in str(error.value)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    save_config(Config(optimizer=OptimizerConfig(lr=0.5, weight_decay=0.25)), path)
    config = parse(Config(), ["--config", str(path), "--lr", "0.125"]).config
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.125, 0.25)


def test_a_default_of_true_can_be_switched_off() -> None:
    assert Config().fsdp.keep_fp32_master
    assert not parse(Config(), ["--no-keep-fp32-master"]).config.fsdp.keep_fp32_master


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Config(), ["--rollout-batch-sise", "3"])
    assert stop.value.code == 2
    assert "--rollout-batch-size" in capsys.readouterr().err


def test_print_config_is_what_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Config(), ["--lr", "0.5", "--print-config"])
    assert stop.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(Config(), path).optimizer.lr == 0.5


def test_check_failure_exits_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    def check(config: Config) -> Config:
        problems = Problems()
        batch = resolve_batch(config.batch, problems)
        problems.raise_if_any()
        return dataclasses.replace(config, batch=batch)

    with pytest.raises(SystemExit) as stop:
        parse(Config(), [], check=check)
    assert stop.value.code == 2
    assert "error: --rollout-batch-size is missing" in capsys.readouterr().err
    assert parse(Config(), ["--rollout-batch-size", "4"], check=check).config.batch.global_batch_size == 4


def test_hooks_get_a_flat_view() -> None:
    args = flat_args(Config(optimizer=OptimizerConfig(lr=0.5)))
    assert (args.lr, args.rollout_seed, args.micro_batch_size) == (0.5, 42, 1)
