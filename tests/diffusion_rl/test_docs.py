"""What the documentation says of the diffusion run."""

from __future__ import annotations

from pathlib import Path

from tools.flag_table import render

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_flags_is_up_to_date() -> None:
    """After a change of flags: `uv run scripts/tools/flag_table.py diffusion-rl > docs/diffusion_flags.md`."""
    assert (ROOT / "docs" / "diffusion_flags.md").read_text() == render("diffusion-rl")
