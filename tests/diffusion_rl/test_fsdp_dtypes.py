"""Dtypes of trainer and engine: a bf16 forward is the same on both sides, with parameters of another dtype too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pair_helpers import capture_gradients, pairs_of, roll_out, start

from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.train_data import plan_pairs
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.precision.overrides import DtypeOverrideError
from shared_runtime.weight_sync.session import publish

PATTERNS = ("*.attn.norm_*=fp32", "transformer_blocks.0.*.norm_added_k.*=bf16")
BF16: dict[str, Any] = {"diffusion_forward_dtype": "bf16"}


def plan(pairs: Any) -> Any:
    return plan_pairs(pairs, dp_size=1, num_steps=1, micro_batch_size=6)[0]


@pytest.mark.parametrize("patterns", [(), PATTERNS])
def test_trainer_and_engine_agree_in_bf16(tiny_sd3_dir: Path, patterns: tuple[str, ...]) -> None:
    """The probe: nothing is updated, so a difference would be one of the forward passes."""
    engine = LocalEngine(tiny_sd3_dir, dtype="bf16", param_dtype_patterns=patterns)
    pairs = pairs_of(roll_out(tiny_sd3_dir, engine=engine))
    probe = {"debug_skip_optimizer_step": True, "diffusion_forward_dtype": "bf16"}
    trainer = start(tiny_sd3_dir, param_dtype_patterns=patterns, **probe)
    same = trainer.train(0, plan(pairs))
    trainer.shutdown()
    assert same["train/ratio_abs_minus_1"] < 1e-6
    assert same["train/log_prob_mean_abs_diff"] < 1e-6
    assert same["train/model_output_max_abs_diff"] < 1e-4
    other = start(tiny_sd3_dir, param_dtype_patterns=() if patterns else PATTERNS, **probe)
    assert other.train(0, plan(pairs))["train/model_output_max_abs_diff"] > 1e-3
    other.shutdown()


def test_overridden_weights_train_and_reach_the_engine_in_their_dtype(tiny_sd3_dir: Path) -> None:
    trainer = start(tiny_sd3_dir, param_dtype_patterns=PATTERNS, **BF16)
    engine = LocalEngine(tiny_sd3_dir, dtype="bf16", param_dtype_patterns=PATTERNS)
    pairs = pairs_of(roll_out(tiny_sd3_dir, engine=engine))
    seen = capture_gradients(trainer)
    trainer.train(0, plan(pairs))
    held = {name: tensor.dtype for name, tensor in engine.named_tensors().items()}
    wide = {name for name, dtype in held.items() if dtype == torch.float32}
    assert wide == {
        name
        for name in held
        if ".attn.norm_" in name and not (name.startswith("transformer_blocks.0.") and ".norm_added_k." in name)
    }
    assert wide
    assert any(seen[name].abs().max() > 0 for name in wide)
    publish(InProcessGroup(trainer), InProcessGroup(engine), 1, buffer_size=1 << 20, check_equal=True)
    trainer.shutdown()


def test_a_pattern_that_matches_nothing_is_an_error(tiny_sd3_dir: Path) -> None:
    with pytest.raises(DtypeOverrideError, match="no parameter has a name like that"):
        LocalEngine(tiny_sd3_dir, param_dtype_patterns=("*.nothing=fp32",))
