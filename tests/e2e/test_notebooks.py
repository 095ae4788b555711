"""The notebooks run from top to bottom, and what they show is what they say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def executed(name: str, limit: float) -> tuple[str, list[Any]]:
    """What the cells of a notebook print, and their pictures; it may take `limit` seconds."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    began = time.monotonic()
    NotebookClient(notebook, timeout=400, kernel_name="python3").execute(cwd=str(NOTEBOOKS))
    assert time.monotonic() - began < limit
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    return "".join(output.get("text", "") for output in outputs), pictures


@pytest.mark.slow
def test_group_size_ablation() -> None:
    text, pictures = executed("llm_grpo_ablation.ipynb", 300)
    assert text.count("held-out accuracy") == 3
    assert len(pictures) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)  # it may have to make the pipeline
def test_stochastic_steps_ablation() -> None:
    from diffusion_rl.presets.recipes import tiny_grpo

    tiny_grpo().prepare(False)  # the pipeline comes from the user's cache, or is made there
    text, pictures = executed("diffusion_grpo_ablation.ipynb", 300)
    assert text.count("held-out reward") == 3
    assert len(pictures) == 2
