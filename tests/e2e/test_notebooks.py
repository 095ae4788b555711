"""The notebooks run from top to bottom, and what they show is what they say."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.slow
def test_group_size_ablation() -> None:
    notebook = nbformat.read(NOTEBOOKS / "llm_grpo_ablation.ipynb", as_version=4)
    began = time.monotonic()
    NotebookClient(notebook, timeout=400, kernel_name="python3").execute(cwd=str(NOTEBOOKS))
    assert time.monotonic() - began < 300
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert text.count("held-out accuracy") == 3
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
