"""The frozen list of the diffusion run's flags, and their help."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion_rl.config import RewardOptionsConfig, TrainConfig
from rewards.registry import load
from shared_runtime.cli import flag_names
from shared_runtime.config import ConfigError, Problems

FLAGS = Path(__file__).with_name("flags.txt")


def test_flags_do_not_change_by_accident() -> None:
    """After a deliberate change: `python tests/diffusion_rl/test_config.py` writes the list anew."""
    assert flag_names(TrainConfig) == FLAGS.read_text().split()


def test_flag_names_are_unique() -> None:
    names = flag_names(TrainConfig)
    assert len(names) == len(set(names))


def test_rewards_take_the_options_that_there_are_flags_for() -> None:
    fields = {f.name: f"given-{f.name}" for f in dataclasses.fields(RewardOptionsConfig)}
    options = RewardOptionsConfig(**fields).options()  # type: ignore[arg-type]
    for name, entry in options.items():
        assert set(entry) <= set(inspect.signature(load(name)).parameters), name
    assert sorted(value for entry in options.values() for value in entry.values()) == sorted(fields.values())


@pytest.mark.parametrize(
    ("options", "rm_type", "flags"),
    [
        ({"pickscore_model_path": "m"}, "pickscore", ["--pickscore-processor-path"]),
        ({}, "custom_api", ["--custom-api-rm-config"]),
        ({}, "remote_rm", ["--rm-url"]),
        ({"weighted_mixture_weights": "ocr=1, aesthetic=2"}, "weighted_mixture", ["--aesthetic-head-path"]),
        ({}, "hps", []),
    ],
)
def test_what_a_reward_lacks_is_named(options: dict[str, str], rm_type: str, flags: list[str]) -> None:
    problems = Problems()
    RewardOptionsConfig(**options).check(problems, rm_type)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) if flags else contextlib.nullcontext() as refused:
        problems.raise_if_any()
    assert [problem.rpartition(" ")[2] for problem in (refused.value.problems if refused else [])] == flags


def test_help_imports_no_torch() -> None:
    code = "import sys; from diffusion_rl.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--diffusion-num-steps" in result.stdout


if __name__ == "__main__":
    FLAGS.write_text("\n".join(flag_names(TrainConfig)) + "\n")
