"""The language-model run's configuration: what is refused, in which words, and the frozen list of flags."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_rl.config import TrainConfig, resolve
from shared_runtime.cli import flag_names
from shared_runtime.config import ConfigError

CENTRED = {"loss_type": "score_centering"}
FLAGS = Path(__file__).with_name("flags.txt")


@pytest.fixture
def good() -> TrainConfig:
    return change(
        TrainConfig(),
        model={"hf_checkpoint": Path("model")},
        data={"prompt_data": "p.jsonl", "label_key": "label"},
        batch={"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        reward={"rm_type": "math"},
    )


def change(config: TrainConfig, **groups: dict[str, Any]) -> TrainConfig:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in groups.items()}
    )


def test_a_good_config_passes(good: TrainConfig) -> None:
    assert resolve(good).batch.global_batch_size == 16


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"model": {"hf_checkpoint": None}}, ["--hf-checkpoint"]),
        ({"data": {"prompt_data": None}}, ["--prompt-data"]),
        ({"reward": {"rm_type": None}}, ["--rm-type", "--custom-rm-path"]),
        ({"reward": {"rm_type": "maht"}}, ["maht", "'math'"]),
        ({"reward": {"rm_type": "remote_rm"}}, ["--rm-url"]),
        ({"reward": {"group_rm": True}}, ["--group-rm", "--custom-rm-path"]),
        ({"batch": {"n_samples_per_prompt": 1}}, ["--n-samples-per-prompt is 1", "grpo"]),
        ({"algorithm": {"eps_clip": 1.5}}, ["--eps-clip", "1.5"]),
        ({"algorithm": {"eps_clip_c": 0.5}}, ["--eps-clip-c", "0.5"]),
        ({"algorithm": {"use_unbiased_kl": True}}, ["--use-unbiased-kl", "--use-kl-loss"]),
        ({"algorithm": {"opsm_delta": -1.0}}, ["--opsm-delta", "-1.0"]),
        ({"algorithm": {"kl_loss_coef": 0.1}}, ["--use-kl-loss"]),
        ({"algorithm": {"use_rollout_logprobs": True}, "correction": {"use_tis": True}}, ["--use-rollout-logprobs"]),
        ({"hooks": {"custom_tis_function_path": "a.b"}}, ["--custom-tis-function-path", "--use-tis"]),
        ({"model": {"update_weights_interval": 0}}, ["--update-weights-interval", "0"]),
        (
            {"model": {"update_weights_interval": 4}, "checkpoint": {"save_interval": 10}},
            ["--save-interval 10", "--update-weights-interval 4"],
        ),
        ({"algorithm": {"loss_type": "custom_loss"}}, ["--custom-loss-function-path"]),
        (
            {"algorithm": {"loss_length_divisor": 8.0, "calculate_per_token_loss": True}},
            ["--loss-length-divisor", "--calculate-per-token-loss"],
        ),
        ({"algorithm": {"loss_length_divisor": 0.0}}, ["--loss-length-divisor must be above 0"]),
        ({"algorithm": {"ref_update_interval": 2}}, ["--ref-update-interval", "--use-kl-loss or --kl-coef"]),
        (
            {"algorithm": {"ref_update_interval": 2, "use_kl_loss": True}, "lora": {"lora_rank": 4}},
            ["--ref-update-interval can't be used with LoRA"],
        ),
        ({"algorithm": {"advantage_estimator": "ppo", "kl_coef": 0.1}}, ["--kl-coef must be 0", "--use-kl-loss"]),
        ({"algorithm": {"advantage_estimator": "ppo", "lambd": 1.5}}, ["--lambd", "1.5"]),
        (
            {
                "algorithm": {"advantage_estimator": "ppo", "loss_type": "custom_loss"},
                "hooks": {"custom_loss_function_path": "a.b.c"},
            },
            ["custom_loss reads no advantages"],
        ),
        ({"critic": {"critic_lr": 1e-5}}, ["--critic-lr", "--advantage-estimator ppo"]),
        (
            {
                "algorithm": {"advantage_estimator": "ppo"},
                "batch": {"num_rollout": 3},
                "critic": {"num_critic_only_steps": 3},
            },
            ["--num-critic-only-steps 3", "3 rollouts"],
        ),
        ({"sampling": {"rollout_temperature": 0.0}}, ["--rollout-temperature"]),
        ({"sampling": {"rollout_top_p": 0.0}}, ["--rollout-top-p"]),
        ({"sampling": {"rollout_top_k": 0}}, ["--rollout-top-k"]),
        ({"sampling": {"rollout_top_p": 0.9}}, ["--rollout-top-p 0.9 needs a positive --rollout-top-k"]),
        (
            {"sampling": {"rollout_top_k": 8}, "algorithm": {"use_kl_loss": True}},
            ["--use-kl-loss compares probabilities over the whole vocabulary", "--rollout-top-k 8"],
        ),
        (
            {
                "sampling": {"rollout_top_k": 8},
                "algorithm": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
            },
            ["--kl-coef compares probabilities over the whole vocabulary"],
        ),
        (
            {
                "sampling": {"rollout_top_k": 8},
                "distillation": {"use_opd": True, "opd_type": "fsdp", "opd_teacher_load": Path("teacher")},
            },
            ["--use-opd compares probabilities over the whole vocabulary"],
        ),
        ({"sampling": {"rollout_top_logprobs_num": 8}}, ["only --loss-type score_centering reads"]),
        ({"score_centering": {"score_centering_is": "tis"}}, ["--score-centering-is", "--loss-type score_centering"]),
        ({"algorithm": CENTRED}, ["--loss-type score_centering needs --rollout-top-logprobs-num"]),
        (
            {"algorithm": CENTRED, "sampling": {"rollout_top_logprobs_num": 4, "rollout_top_k": 8}},
            ["--rollout-top-logprobs-num 4 can't hold the --rollout-top-k 8"],
        ),
        (
            {
                "algorithm": {**CENTRED, "advantage_estimator": "rloo", "use_opsm": True},
                "correction": {"use_tis": True},
            },
            ["--advantage-estimator grpo, not of rloo", "--use-opsm does not go together", "--use-tis and --use-rs"],
        ),
        (
            {"algorithm": CENTRED, "hooks": {"custom_convert_samples_to_train_data_path": "a.b"}},
            ["--custom-convert-samples-to-train-data-path does not go together with --loss-type score_centering"],
        ),
        (
            {"score_centering": {"score_centering_mis_low": 3.0, "score_centering_mis_high": 2.0}},
            ["--score-centering-mis-low 3.0 is above --score-centering-mis-high 2.0"],
        ),
        ({"sampling": {"rollout_stop": ("=", "")}}, ["--rollout-stop", "empty"]),
        ({"evaluation": {"eval_prompt_data": ("one",)}}, ["--eval-prompt-data", "pairs"]),
        ({"evaluation": {"eval_interval": 5}}, ["--eval-prompt-data"]),
        ({"fsdp": {"dp_replicate_size": 2}}, ["--dp-replicate-size 2", "1 trainer rank"]),
        ({"cluster": {"actor_num_gpus_per_node": 2}, "run": {"in_process": True}}, ["--in-process", "2"]),
        ({"checkpoint": {"load": Path("/x/iter_0000003")}}, ["parent", "/x"]),
        ({"debug": {"save_debug_rollout_data": "a.jsonl"}}, ["--save-debug-rollout-data", "{rollout_id}"]),
        ({"debug": {"debug_train_only": True}}, ["--load-debug-rollout-data"]),
    ],
)
def test_what_cannot_work_is_refused(good: TrainConfig, groups: dict[str, dict[str, Any]], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(change(good, **groups))
    for word in words:
        assert word in str(error.value)


def test_ppo_needs_no_groups(good: TrainConfig) -> None:
    ppo = change(good, algorithm={"advantage_estimator": "ppo"}, batch={"n_samples_per_prompt": 1})
    assert resolve(ppo).batch.global_batch_size == 4


def test_all_problems_come_together(good: TrainConfig) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(change(good, model={"hf_checkpoint": None}, reward={"rm_type": None}, algorithm={"eps_clip": -1.0}))
    assert len(error.value.problems) == 3


def test_flags_do_not_change_by_accident() -> None:
    """After a deliberate change: `python tests/llm_rl/test_config.py` writes the list anew."""
    assert flag_names(TrainConfig) == FLAGS.read_text().split()


def test_flag_names_are_unique() -> None:
    names = flag_names(TrainConfig)
    assert len(names) == len(set(names))


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys; from llm_rl.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    best = 9.0
    for _ in range(3):  # the best of three, in seconds of CPU: the machine may be busy
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "--rollout-batch-size" in result.stdout
    assert best < 1.0, f"help took {best:.2f} s"


if __name__ == "__main__":
    FLAGS.write_text("\n".join(flag_names(TrainConfig)) + "\n")
