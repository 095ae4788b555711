"""Remote teachers over real HTTP: log-probs, routing, tokenizers; and a whole run with either kind of teacher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from fsdp_helpers import make_rows, row_log_probs
from fsdp_reference import plain_model
from teacher_server import teacher_server
from transformers import AutoTokenizer

from llm_rl.algorithms.opd import TopKStrategy
from llm_rl.config import resolve
from llm_rl.preflight import preflight
from llm_rl.presets.recipes import tiny_opd
from llm_rl.presets.tiny import write_model, write_sums
from llm_rl.sample import Sample
from llm_rl.teachers import RemoteTeachers, check_same_tokenizer
from llm_rl.train import train
from rewards import RewardServiceError
from shared_runtime.config import ConfigError
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.rollout.types import RolloutError

QUICK = {"retries": 0, "timeout_s": 20}


@pytest.fixture(scope="module")
def teacher_dirs(tmp_path_factory) -> list[Path]:
    directories = [tmp_path_factory.mktemp("math"), tmp_path_factory.mktemp("code")]
    for seed, directory in enumerate(directories, start=3):
        write_model(directory, seed=seed)
    return directories


@pytest.fixture(scope="module")
def urls(teacher_dirs):
    with teacher_server(teacher_dirs[0]) as math, teacher_server(teacher_dirs[1]) as code:
        yield {"math": math, "code": code}


def make_samples(names: list[str | None]) -> tuple[list[Sample], list[dict[str, Any]]]:
    rows = make_rows(40, groups=2)[: len(names)]
    samples = [
        Sample(
            index=i,
            tokens=row["tokens"].tolist(),
            prompt_length=len(row["tokens"]) - row["response_length"],
            metadata={} if name is None else {"opd_teacher": name},
        )
        for i, (row, name) in enumerate(zip(rows, names, strict=True))
    ]
    return samples, rows


def other_tokenizer() -> Any:
    """The tiny preset's with two digits exchanged."""
    from llm_rl.presets.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]
    return type(tokenizer)(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)))


def test_each_sample_is_scored_by_its_teacher(urls, teacher_dirs):
    names = ["math", "code", "math", None, "poetry"]
    samples, rows = make_samples(names)
    teachers = RemoteTeachers(urls | {"default": urls["code"]}, options=QUICK)
    teachers.score(samples)
    teachers.close()
    models = [plain_model(directory) for directory in teacher_dirs]
    for sample, row, name in zip(samples, rows, names, strict=True):
        expected = row_log_probs(models[0 if name == "math" else 1], row).detach()
        torch.testing.assert_close(torch.tensor(sample.teacher_log_probs), expected, rtol=0, atol=1e-5)
        assert len(sample.teacher_log_probs) == row["response_length"]


def test_a_sample_without_teacher_is_an_error(urls, tmp_path):
    teachers = RemoteTeachers(urls, options=QUICK)
    samples, _ = make_samples(["math", "poetry"])
    with pytest.raises(RolloutError, match=r"sample 1.*'poetry'.*code, math and no default"):
        teachers.score(samples)
    path = tmp_path / "p.jsonl"
    rows = [{"input": "1+1=", "metadata": {"opd_teacher": name}} for name in ("code", "poetry")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = teachers.row_problems(PromptDataset.load(str(path)))
    assert problem.startswith(f"{path}:2: ")
    teachers.close()


def test_another_tokenizer_is_refused(urls, teacher_dirs, tmp_path):
    ours = AutoTokenizer.from_pretrained(teacher_dirs[0])
    check_same_tokenizer(ours, teacher_dirs[1])
    same = RemoteTeachers(urls, options=QUICK)
    same.check_tokenizer(ours)
    same.close()
    other_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"another tokenizer .*: 2 tokens differ, among them '3', '7'"):
        check_same_tokenizer(ours, tmp_path)
    with teacher_server(teacher_dirs[0], other_tokenizer()) as url:
        teachers = RemoteTeachers({"math": url}, options=QUICK)
        with pytest.raises(ValueError, match="another tokenizer than --hf-checkpoint: token 6 is '7' there and '3'"):
            teachers.check_tokenizer(ours)
        teachers.close()


def test_a_failing_teacher_is_named(urls, teacher_dirs):
    samples, _ = make_samples(["math"])
    teachers = RemoteTeachers({"math": urls["math"].replace("/generate", "/nowhere")}, options=QUICK)
    with pytest.raises(RewardServiceError, match=r"sample 0.*HTTP 404"):
        teachers.score(samples)
    with pytest.raises(ValueError, match=r"--opd-type sglang: teacher math.*HTTP 404"):
        teachers.check_tokenizer(AutoTokenizer.from_pretrained(teacher_dirs[0]))
    teachers.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"opd_type": None, "opd_teacher_load": None}, "needs a teacher: --opd-type fsdp or --opd-type sglang"),
        ({"opd_teacher_load": None}, "--opd-type fsdp and --opd-teacher-load"),
        ({"opd_type": "sglang", "opd_teacher_load": None}, "--opd-teacher-urls NAME=URL"),
        ({"opd_type": "sglang"}, "--opd-teacher-load, the directory of its teacher, go together"),
        ({"opd_teacher_urls": ("a=http://x/generate",)}, "it needs --opd-type sglang"),
        ({"opd_type": "sglang", "opd_teacher_load": None, "opd_teacher_urls": ("x:1",)}, "takes NAME=URL"),
        (
            {"opd_type": "sglang", "opd_teacher_load": None, "opd_teacher_urls": ("a=http://x", "a=http://y")},
            "the same name",
        ),
        ({"opd_kl_coef": -1.0}, "--opd-kl-coef"),
        ({"use_opd": False}, "--opd-teacher-load has no effect without --use-opd"),
    ],
)
def test_distillation_that_cannot_work_is_refused(changes, words):
    config = tiny_opd().config
    config = dataclasses.replace(config, distillation=dataclasses.replace(config.distillation, **changes))
    with pytest.raises(ConfigError) as error:
        resolve(config)
    assert words in str(error.value)


@pytest.fixture(scope="module")
def small(tiny_model_dir, teacher_dirs, tmp_path_factory):
    """Two rollouts of the recipe in this process, with the untrained model and an untrained teacher."""
    prompts = write_sums(tmp_path_factory.mktemp("sums"))
    config = tiny_opd().config
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, in_process=True, runs_dir=tmp_path_factory.mktemp("runs")),
        model=dataclasses.replace(config.model, hf_checkpoint=tiny_model_dir),
        data=dataclasses.replace(config.data, prompt_data=f"{prompts.train}@[0:40]"),
        batch=dataclasses.replace(config.batch, num_rollout=2, rollout_batch_size=4, n_samples_per_prompt=1),
        evaluation=dataclasses.replace(config.evaluation, eval_prompt_data=(), eval_interval=None, eval_target=None),
        distillation=dataclasses.replace(config.distillation, opd_teacher_load=teacher_dirs[0]),
    )


def metrics_of(config, name: str) -> list[dict[str, float]]:
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_name=name))
    lines = (train(config).directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


@pytest.mark.parametrize(
    "top_k",
    [{}, *({"opd_log_prob_top_k": 4, "opd_top_k_strategy": name} for name in get_args(TopKStrategy))],
    ids=lambda top_k: top_k.get("opd_top_k_strategy", "sampled"),
)
def test_both_kinds_of_teacher_train_alike(small, urls, top_k):
    """Whole runs: the teacher's log-probs by HTTP or from the trainer give the same numbers."""
    local = dataclasses.replace(small.distillation, **top_k)
    name = f"{local.opd_log_prob_top_k}-{local.opd_top_k_strategy}"
    loaded = metrics_of(dataclasses.replace(small, distillation=local), f"loaded-{name}")
    remote = dataclasses.replace(
        local, opd_type="sglang", opd_teacher_load=None, opd_teacher_urls=(f"default={urls['math']}",)
    )
    served = metrics_of(dataclasses.replace(small, distillation=remote), f"served-{name}")
    assert len(loaded) == len(served) == 2
    for a, b in zip(loaded, served, strict=True):
        for key in ("train/opd_reverse_kl", "train/loss", "train/grad_norm", "rollout/raw_reward"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key
        assert a["train/grad_norm"] > 0  # with rewards of 0 and groups of one, it comes from the teacher
        assert "perf/teacher_time" in b


def test_a_foreign_teacher_stops_before_the_start(small, tmp_path):
    write_model(tmp_path)
    other_tokenizer().save_pretrained(tmp_path)
    foreign = dataclasses.replace(small.distillation, opd_teacher_load=tmp_path)
    with pytest.raises(ConfigError, match="another tokenizer"):
        preflight(resolve(dataclasses.replace(small, distillation=foreign)))
