"""What the documentation says of the diffusion run."""

from __future__ import annotations

import pytest
from documentation import ROOT, commands
from tools.flag_table import render

from diffusion_rl.cli import train_from_command_line
from diffusion_rl.config import TrainConfig
from diffusion_rl.presets.recipes import tiny_grpo, tiny_nft, tiny_sft

DEFAULTS = {
    "scripts/run_diffusion_grpo.py": tiny_grpo().config,
    "scripts/run_diffusion_nft.py": tiny_nft().config,
    "scripts/run_diffusion_sft.py": tiny_sft().config,
    "diffusion-rl": TrainConfig(),
}
PAGES = [ROOT / "docs" / "diffusion.md", ROOT / "packages" / "diffusion_rl" / "README.md"]
COMMANDS = [
    pytest.param(words, id=" ".join(words)[:60])
    for page in PAGES
    for words in commands(page)
    if words[:2] == ["uv", "run"] and words[2] in DEFAULTS
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for word in words[3:] if word != "train"]
    with pytest.raises(SystemExit) as exit_:
        train_from_command_line(DEFAULTS[words[2]], [*flags, "--print-config"], recipe="docs")
    assert exit_.value.code == 0, capsys.readouterr().err


def test_the_table_of_flags_is_up_to_date() -> None:
    """After a change of flags: `uv run scripts/tools/flag_table.py diffusion-rl > docs/diffusion_flags.md`."""
    assert (ROOT / "docs" / "diffusion_flags.md").read_text() == render("diffusion-rl")
