"""The memory estimate counts what the files hold."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llm_rl.models.memory import count_parameters, run_bytes


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) is None
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file(
        {"c": torch.zeros(2, 2, 2, dtype=torch.bfloat16), "d": torch.tensor(1.0)}, tmp_path / "model-2.safetensors"
    )
    assert count_parameters(tmp_path) == 15 + 7 + 8 + 1


def test_estimate_grows_with_what_is_held() -> None:
    base: dict[str, Any] = {"train_dtype": "fp32", "rollout_dtype": "fp32", "num_engines": 1, "num_trainers": 1}
    fp32 = run_bytes(10**9, **base, with_reference=False)
    assert 20 * 10**9 <= fp32 < 22 * 10**9  # 4 weights + 4 gradients + 8 moments + 4 engine
    assert run_bytes(10**9, **base, with_reference=True) - fp32 == 4 * 10**9
    assert run_bytes(10**9, **base, with_reference=False, with_critic=True) - fp32 == 16 * 10**9
    assert fp32 - run_bytes(10**9, **base, with_reference=False, adam=False) == 8 * 10**9
    engine_only = run_bytes(10**9, **(base | {"num_trainers": 0}), with_reference=False)
    assert 4 * 10**9 <= engine_only < 5 * 10**9
