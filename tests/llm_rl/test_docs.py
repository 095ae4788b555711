"""The documentation of the language half: commands parse, examples run, the table of flags is that of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documentation import ROOT, blocks, commands
from tools.flag_table import field_docstrings, render

from llm_rl.cli import train_from_command_line
from llm_rl.config import TrainConfig
from llm_rl.presets.recipes import PRESETS, tiny_opd
from shared_runtime.config import load_config
from shared_runtime.data import PromptDataset

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "packages" / "llm_rl" / "README.md"]
RECIPES = {"scripts/run_llm_grpo.py": PRESETS, "scripts/run_llm_opd.py": {"tiny": tiny_opd}}
COMMANDS = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands(page)
    if (words[:2] == ["uv", "run"] and words[2] in RECIPES) or words[:4] == ["uv", "run", "llm-rl", "train"]
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(blocks(ROOT / "docs" / "configuration.md", "yaml")[0])
    monkeypatch.chdir(tmp_path)
    default = TrainConfig()
    if words[2].startswith("scripts/"):
        model, flags = "tiny", words[3:]
        if "--model" in flags:
            at = flags.index("--model")
            model, flags = flags[at + 1], flags[:at] + flags[at + 2 :]
        default = RECIPES[words[2]][model]().config
    else:
        flags = words[4:]
    with pytest.raises(SystemExit) as exit_:
        train_from_command_line(default, [*flags, "--print-config"], recipe="docs")
    assert exit_.value.code == 0, capsys.readouterr().err


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """What docs/configuration.md says of its example."""
    file = tmp_path / "mine.yaml"
    file.write_text(blocks(ROOT / "docs" / "configuration.md", "yaml")[0])
    config = load_config(PRESETS["tiny"]().config, file)
    assert (config.batch.rollout_batch_size, config.optimizer.lr) == (16, 1e-5)
    assert config.sampling.rollout_max_response_len == 4


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_data_examples_are_prompt_files(page: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(blocks(ROOT / page, "jsonl")[0])
    dataset = PromptDataset.load(path, input_key="question", label_key="answer")
    assert dataset[0].label == "42"


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_package_run(number: int, tmp_path: Path) -> None:
    code = blocks(ROOT / "packages" / "llm_rl" / "README.md", "python")[number]
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = ["runs/llm-rl runs/llm-rl/metrics.jsonl runs/llm-rl/hf", "tensor([-1.0000, -0.3679,  1.6487]"][number]
    assert expected in result.stdout


def test_the_recipe_in_the_architecture_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["my_sums.py", "--print-config"])
    with pytest.raises(SystemExit) as exit_:
        exec(blocks(ROOT / "docs" / "architecture.md", "python")[0], {})
    assert exit_.value.code == 0


def test_the_table_of_flags_is_up_to_date() -> None:
    """After a change of flags: `uv run scripts/tools/flag_table.py > docs/flags.md`."""
    assert (ROOT / "docs" / "flags.md").read_text() == render("llm-rl")


def test_docstrings_belong_to_the_field_above() -> None:
    found = field_docstrings(type(TrainConfig().batch))
    assert found["micro_batch_size"] == "Samples per forward pass. Ignored with --use-dynamic-batch-size."
    assert found["max_tokens_per_gpu"].startswith("Token budget")
