"""LoRA through the trainer: gradients, the reference without a copy, publication, checkpoints, exports, averages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pair_helpers import PROMPTS, capture_gradients, full_weights, pairs_of, roll_out, start
from torch import Tensor

from diffusion_rl.algorithms.nft_timesteps import drop_final_steps
from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.models.loading import load_component, load_pipeline
from diffusion_rl.models.registry import get_family
from diffusion_rl.sample import Sample
from diffusion_rl.train_data import plan_pairs, rollout_advantages, samples_to_noised_rows
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.weight_sync.session import publish

LORA: dict[str, Any] = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def samples(tiny_sd3_dir: Path) -> list[Sample]:
    return roll_out(tiny_sd3_dir)


def plan(pairs: Any, **layout: Any) -> Any:
    return plan_pairs(pairs, **({"dp_size": 1, "num_steps": 1, "micro_batch_size": 6} | layout))[0]


def trained(model: Path, samples: list[Sample], **changes: Any) -> Any:
    """A trainer whose adapters have left their start, where B is zero."""
    trainer = start(model, **(LORA | {"lr": 1e-2} | changes))
    trainer.train(0, plan(pairs_of(samples), num_steps=2))
    return trainer


def plain_model(trainer: Any, model: Path) -> torch.nn.Module:
    """The transformer with the adapters merged by PEFT's own arithmetic, one layer after the other."""
    plain = load_component(str(model), get_family("sd3"), "transformer", dtype=torch.float32)
    weights = full_weights(trainer)
    for name, parameter in plain.named_parameters():
        layer = name.removesuffix(".weight")
        a, b = (weights.get(f"{layer}.lora_{x}.default.weight") for x in "AB")
        if a is not None and b is not None:
            parameter.data += (b @ a) * 2.0
    return plain


def test_before_the_first_update_the_ratio_is_one(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    trainer = start(tiny_sd3_dir, **LORA, ref_mode="lora_base", diffusion_kl_beta=0.1, debug_skip_optimizer_step=True)
    metrics = trainer.train(0, plan(pairs_of(samples)))
    assert metrics["train/ratio_abs_minus_1"] < 1e-6
    assert metrics["train/log_prob_mean_abs_diff"] < 1e-6
    assert metrics["train/model_output_max_abs_diff"] < 1e-4
    assert metrics["train/kl_loss"] == 0.0
    trainer.shutdown()


def test_gradient_is_the_merged_models_by_the_chain_rule(
    tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """With W' = W + s·B·A: dL/dA = s·Bᵀ·dL/dW' and dL/dB = s·dL/dW'·Aᵀ, the latter from full fine-tuning."""
    trainer = trained(tiny_sd3_dir, samples)
    weights = full_weights(trainer)
    seen = capture_gradients(trainer)
    pairs = pairs_of(samples)
    trainer.train(1, plan(pairs))
    trainer.save_hf(tmp_path / "sd3-merged")
    trainer.shutdown()
    full = start(tmp_path / "sd3-merged")
    expected = capture_gradients(full)
    full.train(1, plan(pairs))
    full.shutdown()
    assert seen.keys() == {name for name in weights if ".lora_" in name}
    for name, gradient in seen.items():
        layer = name.partition(".lora_")[0]
        a, b = (weights[f"{layer}.lora_{x}.default.weight"] for x in "AB")
        outer = expected[f"{layer}.weight"]
        chained = 2.0 * (b.T @ outer if ".lora_A." in name else outer @ a.T)
        torch.testing.assert_close(gradient, chained, rtol=1e-3, atol=1e-3 * chained.abs().max().item() + 1e-9)


def test_reference_is_the_model_without_its_adapters(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    """The same loss and gradient as with a second copy of the model, which lora_base doesn't hold."""
    found = []
    for mode in ("lora_base", "ref"):
        trainer = trained(tiny_sd3_dir, samples, ref_mode=mode, diffusion_kl_beta=0.5)
        assert (trainer.reference is None) == (mode == "lora_base")
        seen = capture_gradients(trainer)
        metrics = trainer.train(1, plan(pairs_of(samples)))
        found.append((metrics, dict(seen)))
        trainer.shutdown()
    assert found[0][0]["train/kl_loss"] > 0
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-6, atol=1e-9)


def test_engines_get_the_merged_weights_and_the_base_stays(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    trainer = trained(tiny_sd3_dir, samples)
    base = {name: w for name, w in full_weights(trainer).items() if ".lora_" not in name}
    engine = LocalEngine(tiny_sd3_dir)
    for version in (1, 2):
        publish(InProcessGroup(trainer), InProcessGroup(engine), version, buffer_size=1 << 20, check_equal=True)
    for name, weight in plain_model(trainer, tiny_sd3_dir).named_parameters():
        assert torch.equal(engine.named_tensors()[name], weight)
    for name, weight in full_weights(trainer).items():
        assert ".lora_" in name or torch.equal(weight, base[name])
    trainer.shutdown()


def test_checkpoints_hold_the_adapters_and_resume_is_exact(
    tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path
) -> None:
    pairs = pairs_of(samples)
    whole = trained(tiny_sd3_dir, samples)
    whole.save(tmp_path)
    expected = whole.train(1, plan(pairs, num_steps=2))
    adapters = sum(p.numel() for p in whole.checkpoint_tensors().values())
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert stored < 3 * 4 * adapters + 500_000  # A and B with two moments, and no model
    resumed = start(tiny_sd3_dir, **LORA, lr=1e-2)
    resumed.load(tmp_path)
    assert resumed.train(1, plan(pairs, num_steps=2)) == expected
    weights = full_weights(whole)
    for name, weight in full_weights(resumed).items():
        assert torch.equal(weight, weights[name])
    whole.shutdown()
    resumed.shutdown()


def test_exports_load_merged_and_as_adapters(tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path) -> None:
    trainer = trained(tiny_sd3_dir, samples)
    target = tmp_path / "sd3-exported"
    trainer.save_hf(target)
    expected = plain_model(trainer, tiny_sd3_dir).state_dict()
    trainer.shutdown()
    family = get_family("sd3")
    for name, weight in load_component(str(target), family, "transformer", dtype=torch.float32).state_dict().items():
        assert torch.equal(weight, expected[name])

    def draw(pipeline: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        size = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pt"}
        return pipeline(PROMPTS[0], generator=generator, **size).images

    original, merged = (load_pipeline(str(directory), family) for directory in (tiny_sd3_dir, target))
    before = draw(original)
    original.load_lora_weights(target / "lora", weight_name="pytorch_lora_weights.safetensors")
    torch.testing.assert_close(draw(original), draw(merged), rtol=0, atol=1e-5)
    assert (draw(original) - before).abs().max() > 1e-3


def test_the_average_of_nft_is_over_the_adapters(tiny_sd3_dir: Path) -> None:
    samples = roll_out(tiny_sd3_dir, sde_type="ode", guidance_scale=1.0)
    args = SimpleNamespace(diffusion_nft_num_dropped_timesteps=2)
    rows = samples_to_noised_rows(samples, rollout_advantages(samples), drop_final_steps, args, seed=3)
    nft: dict[str, Any] = {"loss_type": "nft", "use_ema": True, "rollout_weights": "ema"}
    more = {"diffusion_guidance_scale": 1.0, "ema_decay_init": 0.9, "ema_decay_flat_steps": 9, "lr": 1e-2}
    trainer = start(tiny_sd3_dir, **LORA, **nft, **more)
    before = full_weights(trainer)
    first = trainer.train(0, plan(rows))
    assert first["train/old_velocity_distance"] == 0.0
    assert trainer.ema.averages.keys() == trainer.checkpoint_tensors().keys()
    name = next(name for name in before if name.endswith("lora_B.default.weight"))
    layer, after = name.partition(".lora_")[0], full_weights(trainer)
    a, b = (
        0.9 * before[f"{layer}.lora_{x}.default.weight"] + 0.1 * after[f"{layer}.lora_{x}.default.weight"] for x in "AB"
    )
    published = trainer.published_tensors()[f"{layer}.weight"].merged().full_tensor()
    torch.testing.assert_close(published, before[f"{layer}.base_layer.weight"] + 2.0 * b @ a)
    assert trainer.train(1, plan(rows))["train/old_velocity_distance"] > 0
    trainer.shutdown()


def test_training_goes_on_from_exported_adapters(tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path) -> None:
    """The adapters that a run exports start the next one at the same weights, and make a reference of its own."""
    first = trained(tiny_sd3_dir, samples)
    first.save_hf(tmp_path / "sd3-first")
    adapters, weights = tmp_path / "sd3-first" / "lora", full_weights(first)
    expected = plain_model(first, tiny_sd3_dir).state_dict()
    first.shutdown()
    more: dict[str, Any] = {"ref_mode": "ref", "ref_lora_adapter_path": adapters, "diffusion_kl_beta": 0.1}
    second = start(tiny_sd3_dir, **LORA, lora_adapter_path=adapters, lr=1e-2, **more)
    for name, weight in full_weights(second).items():
        assert torch.equal(weight, weights[name])
    for name, parameter in second.reference.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name], rtol=0, atol=1e-7)
    metrics = second.train(0, plan(pairs_of(samples)))
    assert metrics["train/kl_loss"] < 1e-9  # the policy still is its reference
    second.shutdown()
