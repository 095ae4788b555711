"""The tools that read what runs leave behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image
from tools import plot_runs


def write_run(directory: Path, rows: list[str]) -> None:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))


def test_runs_are_drawn_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, last in (("a", 0.4), ("b", 0.9)):
        rewards = [f'{{"step": {step}, "rollout/raw_reward": {last * step / 3}}}' for step in range(4)]
        write_run(tmp_path / name, ['{"step": -1, "eval/shapes": 0.1}', *rewards])
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["plot_runs.py", str(picture), str(tmp_path / "a"), str(tmp_path / "b")])
    plot_runs.main()
    with Image.open(picture) as drawn:
        assert drawn.size == (1300, 494)
        colours = {colour for _, colour in drawn.convert("RGB").getcolors(maxcolors=1 << 20)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # a curve of each run


def test_a_run_without_rewards_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "empty", ['{"step": -1, "eval/shapes": 0.1}'])
    monkeypatch.setattr(sys, "argv", ["plot_runs.py", str(tmp_path / "curves.png"), str(tmp_path / "empty")])
    with pytest.raises(ValueError, match="empty has no reward"):
        plot_runs.main()
