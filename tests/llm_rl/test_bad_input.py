"""What a command line that can't work gets: exit status 2 and one message that names the place and the way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from llm_rl.cli import train_from_command_line
from llm_rl.config import TrainConfig
from shared_runtime.tracking.run_dir import open_run_directory

ROWS = [{"prompt": f"{a}+{a}=", "label": str(2 * a)} for a in range(1, 9)]
GOOD = {
    "--input-key": "prompt",
    "--label-key": "label",
    "--rm-type": "math",
    "--rollout-batch-size": "2",
    "--n-samples-per-prompt": "2",
    "--rollout-max-response-len": "8",
    "--num-rollout": "1",
    "--progress": "none",
}


class Shell:
    """A folder with prompts, and `refused`: the message of a command that must not start."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.capsys = folder, model, capsys
        self.write(*(json.dumps(row) for row in ROWS))

    def write(self, *lines: str, name: str = "prompts.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def write_rows(self, *changes: dict[str, Any]) -> None:
        """One good row, then good rows with changes; a value of `...` takes the key away."""
        rows = [ROWS[0], *({k: v for k, v in (ROWS[1] | change).items() if v is not ...} for change in changes)]
        self.write(*(json.dumps(row) for row in rows))

    def words(self, *flags: str, **values: str | None) -> list[str]:
        """A command that works, with `flags` behind and values of other flags changed or (`None`) left out."""
        given: dict[str, str | None] = {"--hf-checkpoint": str(self.model), "--prompt-data": "prompts.jsonl", **GOOD}
        given |= {f"--{name.replace('_', '-')}": value for name, value in values.items()}
        return ["--in-process", *flags, *(word for name, value in given.items() if value for word in (name, value))]

    def run(self, *flags: str, **values: str | None) -> None:
        train_from_command_line(TrainConfig(), self.words(*flags, **values), recipe="bad", prog="llm-rl train")

    def refused(self, *flags: str, **values: str | None) -> str:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            self.run(*flags, **values)
        assert exit_.value.code == 2
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        assert not (self.folder / "runs").exists(), "nothing may be started"
        assert out == ""
        return err


@pytest.fixture
def shell(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, tiny_model_dir, capsys)


def test_the_good_command_passes_its_checks(shell: Shell) -> None:
    shell.run("--dry-run")
    assert "everything checked" in shell.capsys.readouterr().out


# Adapters


def test_adapters_for_layers_that_are_not_there(shell: Shell) -> None:
    message = shell.refused(lora_rank="4", target_modules="to_q")
    assert "--target-modules to_q: no linear layer of Qwen3ForCausalLM" in message
    assert "q_proj" in message


def test_flags_of_adapters_without_adapters(shell: Shell) -> None:
    assert "--target-modules has no effect without --lora-rank" in shell.refused(target_modules="attn")


# Files


def test_missing_prompt_file(shell: Shell) -> None:
    assert "--prompt-data promts.jsonl: no such file; did you mean prompts.jsonl?" in shell.refused(
        prompt_data="promts.jsonl"
    )


def test_missing_evaluation_file(shell: Shell) -> None:
    assert "--eval-prompt-data held_out.jsonl: no such file" in shell.refused(
        "--eval-prompt-data", "sums", "held_out.jsonl"
    )


def test_missing_model(shell: Shell) -> None:
    message = shell.refused(hf_checkpoint="nowhere")
    assert "--hf-checkpoint nowhere is not a Hugging Face model directory" in message


def test_broken_model(shell: Shell) -> None:
    (shell.folder / "model").mkdir()
    (shell.folder / "model" / "config.json").write_text('{"model_type": "no-such-model"}')
    assert "--hf-checkpoint model can't be loaded" in shell.refused(hf_checkpoint="model")


def test_missing_checkpoint(shell: Shell) -> None:
    message = shell.refused(load="elsewhere")
    assert "--load elsewhere holds no checkpoint (no latest_checkpointed_iteration.txt)" in message


def test_missing_recordings(shell: Shell) -> None:
    shell.write("", name="kept-0.jsonl")
    message = shell.refused(load_debug_rollout_data="kept-{rollout_id}.jsonl", num_rollout="3")
    assert "--load-debug-rollout-data: kept-2.jsonl does not exist, so rollout 2 can't be replayed" in message


def test_config_file_that_is_a_directory(shell: Shell) -> None:
    assert "--config . can't be read: Is a directory" in shell.refused("--config", ".")


def test_missing_config_file(shell: Shell) -> None:
    assert "--config mine.yaml: no such file" in shell.refused("--config", "mine.yaml")


# Lines


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "1+1=", "label": "2"', "not valid JSON: Expecting ',' delimiter at column 32"),
        ("['1+1=', '2']", "not valid JSON"),
        ('["1+1=", "2"]', "is an array, not a JSON object; write one object a line"),
        ('{"prompt": "", "label": "2"}', "empty prompt in 'prompt'"),
        ('{"prompt": "  ", "label": "2"}', "empty prompt in 'prompt'"),
        ('{"prompt": [], "label": "2"}', "empty prompt in 'prompt'"),
        ('{"prompt": 7, "label": "2"}', "the prompt in 'prompt' is int, not a string or a list of chat messages"),
        ('{"promt": "1+1=", "label": "2"}', "has no 'prompt' (--input-key); did you mean 'promt'?"),
        ('{"prompt": "1+1=", "label": "2", "metadata": 3}', "'metadata' is int, not an object"),
        ('{"prompt": "1+1="}', "no label, which the reward math needs (--label-key)"),
        ('{"prompt": "1+1=", "label": ""}', "no label, which the reward math needs (--label-key)"),
        ('{"prompt": "1+1=", "label": null}', "no label, which the reward math needs (--label-key)"),
        ('{"prompt": "what is 1+1?", "label": "2"}', "the tokenizer can't encode the prompt"),
        ('{"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "maht"}}', "Did you mean 'math'?"),
    ],
)
def test_a_line_that_is_no_prompt(shell: Shell, line: str, problem: str) -> None:
    shell.write(json.dumps(ROWS[0]), "", line)
    message = shell.refused()
    assert "prompts.jsonl:3: " in message
    assert problem in message


def test_chat_messages_without_a_template(shell: Shell) -> None:
    shell.write_rows({"prompt": [{"role": "user", "content": "1+1="}]})
    message = shell.refused()
    assert "prompts.jsonl:2: " in message
    assert "the tokenizer has no chat template" in message


def test_a_prompt_longer_than_the_context(shell: Shell) -> None:
    shell.write_rows({"prompt": "1+" * 252 + "1="})
    message = shell.refused()
    expected = "the prompt has 506 tokens, the context of 512 minus --rollout-max-response-len 8 leaves 504"
    assert f"prompts.jsonl:2: {expected}" in message


def test_a_prompt_longer_than_asked_for(shell: Shell) -> None:
    shell.write_rows({"prompt": "1+1+1="})
    assert "prompts.jsonl:2: the prompt has 6 tokens, --rollout-max-prompt-len 5 leaves 5" in shell.refused(
        rollout_max_prompt_len="5"
    )


def test_a_response_longer_than_the_context(shell: Shell) -> None:
    message = shell.refused(rollout_max_response_len="512")
    assert "no room for a prompt: the context of 512 minus --rollout-max-response-len 512 leaves 0 tokens" in message


def test_every_bad_line_is_named_at_once(shell: Shell) -> None:
    shell.write_rows({"prompt": ""}, {}, {"prompt": 1})
    message = shell.refused()
    assert "prompts.jsonl:2: " in message
    assert "prompts.jsonl:4: " in message


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("input_key", "did you mean 'prompt'?"),
        ("label_key", "did you mean 'label'?"),
        ("metadata_key", "keys there are"),
    ],
)
def test_a_key_that_no_row_has(shell: Shell, flag: str, hint: str) -> None:
    wrong = {"input_key": "promt", "label_key": "labels", "metadata_key": "extra"}[flag]
    message = shell.refused(**{flag: wrong})
    assert f"no row has the key '{wrong}' (--{flag.replace('_', '-')})" in message
    assert hint in message


def test_labels_that_were_not_asked_for(shell: Shell) -> None:
    message = shell.refused(label_key=None)
    assert "prompts.jsonl:1: no label, which the reward math needs (--label-key)" in message


def test_a_slice_outside_the_file(shell: Shell) -> None:
    message = shell.refused(prompt_data="prompts.jsonl@[4:90]")
    assert "the slice [4:90] reaches beyond its rows; it has 8" in message


# Flags


def test_unknown_flag(shell: Shell) -> None:
    message = shell.refused("--rollout-btach-size", "3")
    assert "--rollout-btach-size" in message
    assert "--rollout-batch-size" in message


def test_value_of_another_type(shell: Shell) -> None:
    message = shell.refused(rollout_batch_size="four")
    assert "--rollout-batch-size" in message
    assert "four" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("batch: {rollout_btach_size: 3}", "unknown key 'rollout_btach_size'; did you mean 'rollout_batch_size'?"),
        ("lr: 1.0", "unknown key 'lr'; it belongs under 'optimizer'"),
        ("optimizer: {lr: fast}", "optimizer: lr: must be a number, got 'fast'"),
        ("- lr", "must hold groups of settings, got list"),
        ("optimizer: {lr: 1", "is not YAML"),
    ],
)
def test_bad_config_file(shell: Shell, text: str, problem: str) -> None:
    (shell.folder / "mine.yaml").write_text(text)
    message = shell.refused("--config", "mine.yaml")
    assert "mine.yaml" in message
    assert problem in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"global_batch_size": "3"}, ["= 4 samples are no multiple of --global-batch-size 3"]),
        (
            {"global_batch_size": "2", "num_steps_per_rollout": "3"},
            ["= 4 samples, but", "= 6", "leave one of the four"],
        ),
        ({"num_steps_per_rollout": "3"}, ["= 4 samples can't be split into --num-steps-per-rollout 3"]),
        ({"rollout_batch_size": None}, ["--rollout-batch-size is missing"]),
        ({"rollout_batch_size": "0"}, ["--rollout-batch-size must be above 0, got 0"]),
        ({"n_samples_per_prompt": "1"}, ["--n-samples-per-prompt is 1: every advantage would be 0"]),
        ({"over_sampling_batch_size": "1"}, ["--over-sampling-batch-size 1 is below --rollout-batch-size 2"]),
    ],
)
def test_batch_numbers_that_do_not_fit(shell: Shell, values: dict[str, str | None], words: list[str]) -> None:
    message = shell.refused(**values)
    assert all(word in message for word in words), message


def test_a_token_budget_below_the_longest_sample(shell: Shell) -> None:
    shell.write_rows({"prompt": "1+1+1+1="})
    message = shell.refused("--use-dynamic-batch-size", max_tokens_per_gpu="15")
    assert "--max-tokens-per-gpu 15 can't hold the longest prompt of 8 tokens" in message
    assert "it must be at least 16" in message
    shell.run("--dry-run", "--use-dynamic-batch-size", max_tokens_per_gpu="16")


def test_dynamic_batches_without_a_budget(shell: Shell) -> None:
    assert "--use-dynamic-batch-size needs --max-tokens-per-gpu" in shell.refused("--use-dynamic-batch-size")


def test_more_ranks_than_a_process_has(shell: Shell) -> None:
    message = shell.refused(actor_num_gpus_per_node="2")
    assert "--in-process is one trainer rank, but the layout asks for 2" in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": "8", "lr_decay_iters": "8", "num_rollout": "30"},
            ["--lr-decay-style cosine falls from the end of --lr-warmup-iters 8 to --lr-decay-iters 8"],
        ),
        (
            {"lr_decay_style": "linear", "lr_warmup_iters": "30", "num_rollout": "30"},
            ["--lr-warmup-iters 30 to the run's optimizer steps: 30"],
        ),
        (
            {
                "advantage_estimator": "ppo",
                "lr_decay_style": "linear",
                "critic_lr_warmup_iters": "9",
                "lr_decay_iters": "9",
                "num_rollout": "10",
            },
            ["--critic-lr-warmup-iters 9 to --lr-decay-iters 9"],
        ),
        ({"rm_type": None}, ["give --rm-type or --custom-rm-path"]),
        ({"rm_type": "maht"}, ["--rm-type maht is unknown", "'math'"]),
        ({"rm_type": "remote_rm"}, ["--rm-type remote_rm needs --rm-url"]),
        ({"kl_coef": "0.1"}, ["--kl-coef", "not of grpo", "--use-kl-loss --kl-loss-coef 0.1"]),
        ({"kl_loss_coef": "0.1"}, ["--kl-loss-coef 0.1 has no effect without --use-kl-loss"]),
        ({"eval_function_path": "json.dumps"}, ["--eval-function-path", "--eval-prompt-data: name at least one"]),
        ({"loss_type": "custom_loss"}, ["--loss-type custom_loss and --custom-loss-function-path go together"]),
        ({"save_debug_rollout_data": "rollouts.jsonl"}, ["must contain {rollout_id}"]),
    ],
)
def test_flags_that_do_not_go_together(shell: Shell, values: dict[str, str | None], words: list[str]) -> None:
    message = shell.refused(**values)
    assert all(word in message for word in words), message


MIS = "llm_rl.algorithms.mis.mis_correction"


@pytest.mark.parametrize(
    ("flags", "values", "words"),
    [
        (["--use-rs"], {}, ["--use-rs is no parameter of", f"--custom-tis-function-path {MIS} has it"]),
        (["--use-rs"], {"custom_tis_function_path": MIS}, ["use_rs", "needs a lower and an upper bound"]),
        (["--use-tis"], {"tis_level": "sequence"}, ["--tis-level is no parameter of", MIS]),
        (["--use-tis"], {"tis_clip": "0.5", "tis_clip_low": "0.9"}, ["lower bound <= upper bound", "0.9 and 0.5"]),
        (
            ["--use-tis", "--tis-batch-normalize"],
            {"custom_tis_function_path": MIS, "tis_level": "geometric"},
            ["tis_batch_normalize works at token and sequence level"],
        ),
        ([], {"tis_clip": "3"}, ["--tis-clip is read only with --use-tis"]),
    ],
)
def test_corrections_that_cannot_work(
    shell: Shell, flags: list[str], values: dict[str, str | None], words: list[str]
) -> None:
    message = shell.refused(*flags, **values)
    assert all(word in message for word in words), message


def test_all_problems_come_in_one_message(shell: Shell) -> None:
    shell.write_rows({"prompt": ""})
    message = shell.refused(hf_checkpoint="nowhere", custom_rm_path="nowhere.reward")
    assert "3 problems" in message
    assert all(word in message for word in ("--hf-checkpoint", "prompts.jsonl:2", "--custom-rm-path"))


# Hooks


@pytest.mark.parametrize(
    ("flag", "path", "words"),
    [
        ("custom_rm_path", "no_such_package.reward", ["no_such_package"]),
        ("custom_rm_path", "reward", ["is not a dotted path; write package.module.function"]),
        ("custom_rm_path", "mine.rewrad", ["has no 'rewrad'; did you mean mine.reward?"]),
        ("custom_rm_path", "mine.CONSTANT", ["expected `[async] def CONSTANT(args, sample)`", "found int"]),
        ("custom_rm_path", "mine.no_args", ["expected `[async] def no_args(args, sample)`", "def no_args(sample)"]),
        ("custom_rm_path", "broken.reward", ["broken", "ZeroDivisionError"]),
        ("custom_generate_function_path", "mine.not_async", ["async def not_async(args, sample, sampling_params)"]),
        ("dynamic_sampling_filter_path", "mine.async_filter", ["it must not be async"]),
        ("data_source_path", "mine.Source", ["the class lacks add_samples, save, load"]),
        ("data_source_path", "mine.reward", ["expected a class"]),
    ],
)
def test_a_hook_that_cannot_be_used(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, flag: str, path: str, words: list[str]
) -> None:
    (shell.folder / "mine.py").write_text(
        "CONSTANT = 3\n"
        "def reward(args, sample): return 0.0\n"
        "def no_args(sample): return 0.0\n"
        "def not_async(args, sample, sampling_params): return sample\n"
        "async def async_filter(args, samples): return True\n"
        "class Source:\n    def __init__(self, args): pass\n    def get_samples(self, num_samples): return []\n"
    )
    (shell.folder / "broken.py").write_text("reward = 1 / 0\n")
    monkeypatch.syspath_prepend(shell.folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    message = shell.refused(**{flag: path})
    assert f"--{flag.replace('_', '-')} " in message
    assert all(word in message for word in words), message


def test_group_rewards_have_their_own_signature(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    (shell.folder / "grouped.py").write_text("def reward(args, sample, more): return 0.0\n")
    monkeypatch.syspath_prepend(shell.folder)
    message = shell.refused("--group-rm", custom_rm_path="grouped.reward")
    assert "expected `[async] def reward(args, samples)`" in message


# The run's directory, and the machine


def test_directory_of_another_run(shell: Shell) -> None:
    with pytest.raises(SystemExit):
        shell.run("--print-config", run_name="mine")
    printed = yaml.safe_load(shell.capsys.readouterr().out)
    with open_run_directory(Path("elsewhere"), "bad", printed, "mine"):
        pass
    message = shell.refused(runs_dir="elsewhere", run_name="mine", lr="0.5")
    assert "elsewhere/mine is a run with another configuration; choose another --run-name" in message
    assert "optimizer.lr" in message
    assert "1e-06" in message
    assert "0.5" in message


def test_directory_that_is_no_run(shell: Shell) -> None:
    (shell.folder / "elsewhere" / "mine").mkdir(parents=True)
    (shell.folder / "elsewhere" / "mine" / "thesis.tex").write_text("")
    message = shell.refused(runs_dir="elsewhere", run_name="mine")
    assert "holds files but no config.yaml: not a run; choose another --run-name" in message


def test_runs_directory_that_is_a_file(shell: Shell) -> None:
    shell.write("", name="afile")
    assert "--runs-dir afile can't be made: File exists" in shell.refused(runs_dir="afile")


def test_too_little_memory(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * 2**20))
    message = shell.refused()
    assert "has 1 M parameters: training and serving it needs at least 1.2 GiB, and 0.5 GiB are free" in message
    assert "Take a smaller model, --optimizer sgd" in message
