"""The memory estimate counts what the files hold and what a trainer keeps of it."""

from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from shared_runtime.training.memory import count_parameters, memory_problem, trained_bytes


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) is None
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file(
        {"c": torch.zeros(2, 2, 2, dtype=torch.bfloat16), "d": torch.tensor(1.0)}, tmp_path / "model-2.safetensors"
    )
    save_file({"a": torch.zeros(3, 5, dtype=torch.float16)}, tmp_path / "model-1.fp16.safetensors")
    assert count_parameters(tmp_path) == 15 + 7 + 8 + 1


def test_bytes_of_a_trained_model() -> None:
    assert trained_bytes(10, compute_dtype="fp32") == 160  # weights, gradients, two moments
    assert trained_bytes(10, compute_dtype="bf16") == 180  # and the copy that computes
    assert trained_bytes(10, compute_dtype="fp32", adam=False) == 80
    assert trained_bytes(10, master_dtype="bf16", compute_dtype="bf16") == 80
    assert trained_bytes(10, compute_dtype="bf16", frozen=True) == 60


def test_what_does_not_fit_is_said_with_numbers(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    assert memory_problem(tmp_path, 10**6, free // 2, "") is None
    problem = memory_problem(tmp_path, 12_345_000_000, 2 * free, "Take less.")
    assert problem is not None
    assert "12345 M parameters" in problem
    assert problem.endswith("Take less.")
