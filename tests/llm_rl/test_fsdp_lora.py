"""LoRA through the trainer: which layers, gradients, the reference without a copy, publication, resume, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import capture_gradients, full_weights, make_rows, make_trainer, plan
from fsdp_reference import plain_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from llm_rl.engines.local import LocalEngine
from llm_rl.models.lora_targets import lora_targets
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.training.lora import LoraError
from shared_runtime.weight_sync.session import publish

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}
SCALING = 2.0
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 16}


def small(**changes: Any) -> Qwen3ForCausalLM:
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**(SIZES | changes)))


def endings(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def trained(directory: Path, **changes: Any) -> FsdpTrainer:
    """A trainer whose adapters have left their start, where B is zero."""
    trainer = make_trainer(directory, **(LORA | {"lr": 1e-2} | changes))
    trainer.train(0, plan(make_rows(), num_steps=2)[0])
    return trainer


class TestTargets:
    ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}

    def test_groups_names_and_exclusions(self) -> None:
        model = small(tie_word_embeddings=False)
        assert endings(lora_targets(model)) == endings(lora_targets(model, ["all-linear"])) == self.ATTENTION | self.MLP
        assert endings(lora_targets(model, ["attn"])) == self.ATTENTION
        assert endings(lora_targets(model, ["mlp,unembed"])) == self.MLP | {"lm_head"}
        assert endings(lora_targets(model, ["attn", "lm_head"], ["k_proj,v_proj"])) == {"q_proj", "o_proj", "lm_head"}
        assert lora_targets(model, ["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]

    def test_what_matches_nothing_is_refused(self) -> None:
        with pytest.raises(LoraError, match="--target-modules to_q: no linear layer of Qwen3ForCausalLM"):
            lora_targets(small(), ["to_q"])
        with pytest.raises(LoraError, match="--exclude-modules lm_hat: no linear layer"):
            lora_targets(small(), exclude_modules=["lm_hat"])
        with pytest.raises(LoraError, match="leaves none"):
            lora_targets(small(), ["q_proj"], ["q_proj"])

    def test_a_tied_output_layer_is_refused(self) -> None:
        with pytest.raises(LoraError, match="output layer is its embedding"):
            lora_targets(small(tie_word_embeddings=True), ["unembed"])

    def test_routed_experts_are_refused(self) -> None:
        with torch.device("meta"):
            experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8))
        assert endings(lora_targets(experts, ["attn"])) == self.ATTENTION
        with pytest.raises(LoraError, match="routed experts have no adapters"):
            lora_targets(experts)


def test_adapters_change_nothing_at_first(tiny_model_dir: Path) -> None:
    """Published weights are the checkpoint's, bit for bit, and the KL divergence to it is zero."""
    trainer = make_trainer(tiny_model_dir, **LORA, use_kl_loss=True, kl_loss_coef=0.1)
    assert trainer.reference is None
    plain = dict(plain_model(tiny_model_dir).named_parameters())
    for name, tensor in trainer.published_tensors().items():
        merged = tensor.merged() if hasattr(tensor, "merged") else tensor
        assert torch.equal(merged.full_tensor(), plain[name])
    assert trainer.train(0, plan(make_rows())[0])["train/kl_loss"] == 0.0
    trainer.shutdown()


def test_gradient_is_the_merged_models_by_the_chain_rule(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With W' = W + s·B·A: dL/dA = s·Bᵀ·dL/dW' and dL/dB = s·dL/dW'·Aᵀ, the latter from full fine-tuning."""
    trainer = trained(tiny_model_dir, clip_grad=0.0)
    weights, seen = full_weights(trainer), capture_gradients(trainer)
    rollout = plan(make_rows(1, version=1))[0]
    trainer.train(1, rollout)
    trainer.save_hf(tmp_path)
    trainer.shutdown()
    full = make_trainer(tmp_path, clip_grad=0.0)
    expected = capture_gradients(full)
    full.train(1, rollout)
    full.shutdown()
    assert seen.keys() == {name for name in weights if ".lora_" in name}
    for name, gradient in seen.items():
        layer = name.partition(".lora_")[0]
        a, b = (weights[f"{layer}.lora_{x}.default.weight"] for x in "AB")
        outer = expected[f"{layer}.weight"]
        chained = SCALING * (b.T @ outer if ".lora_A." in name else outer @ a.T)
        torch.testing.assert_close(gradient, chained, rtol=1e-3, atol=1e-3 * chained.abs().max().item() + 1e-9)


def test_reference_is_the_model_without_its_adapters(tiny_model_dir: Path) -> None:
    """The same loss and gradient as with a second copy of the model."""
    found = []
    for ref_load in (None, tiny_model_dir):
        trainer = trained(tiny_model_dir, use_kl_loss=True, kl_loss_coef=0.5, ref_load=ref_load)
        assert (trainer.reference is None) == (ref_load is None)
        seen = capture_gradients(trainer)
        metrics = trainer.train(1, plan(make_rows(1, version=1))[0])
        found.append((metrics, dict(seen)))
        trainer.shutdown()
    assert found[0][0]["train/kl_loss"] != 0
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-6, atol=1e-9)


def test_engines_get_the_merged_weights_and_the_base_stays(tiny_model_dir: Path) -> None:
    trainer = trained(tiny_model_dir)
    engine = LocalEngine(tiny_model_dir, dtype="fp32")
    publish(InProcessGroup(trainer), InProcessGroup(engine), 1, buffer_size=1 << 20, check_equal=True)
    weights, moved = full_weights(trainer), 0
    for name, base in plain_model(tiny_model_dir).named_parameters():
        layer = name.removesuffix(".weight")
        a, b = (weights.get(f"{layer}.lora_{x}.default.weight") for x in "AB")
        expected = base if a is None or b is None else base + (b @ a) * SCALING
        moved += a is not None
        torch.testing.assert_close(engine.named_tensors()[name], expected.detach(), rtol=0, atol=1e-7)
    assert moved == len(trainer.lora_layers)
    trainer.shutdown()


def test_checkpoints_hold_the_adapters_and_resume_is_exact(tiny_model_dir: Path, tmp_path: Path) -> None:
    rollout = plan(make_rows(1, version=1), num_steps=2)[0]
    whole = trained(tiny_model_dir)
    whole.save(tmp_path)
    adapters = whole.checkpoint_tensors()
    assert adapters
    assert all(".lora_" in name for name in adapters)
    expected = whole.train(1, rollout)
    resumed = make_trainer(tiny_model_dir, **LORA, lr=1e-2)
    resumed.load(tmp_path)
    assert resumed.train(1, rollout) == expected
    weights = full_weights(whole)
    for name, weight in full_weights(resumed).items():
        assert torch.equal(weight, weights[name])
    whole.shutdown()
    resumed.shutdown()


def test_exports_load_merged_and_as_adapters(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The merged model, and PEFT's reading of the adapters over the original one, give the same logits."""
    from peft import PeftModel

    trainer = trained(tiny_model_dir, target_modules=("attn", "up_proj"))
    trainer.save_hf(tmp_path)
    trainer.shutdown()
    tokens = torch.arange(3, 12)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    before = base(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "lora"))(tokens).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    assert (merged - before).abs().max() > 0.01


def test_training_goes_on_from_exported_adapters(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trained(tiny_model_dir)
    trainer.save_hf(tmp_path)
    weights = full_weights(trainer)
    trainer.shutdown()
    second = make_trainer(tiny_model_dir, **LORA, lora_adapter_path=tmp_path / "lora")
    for name, weight in full_weights(second).items():
        assert torch.equal(weight, weights[name])
    second.shutdown()
    with pytest.raises(LoraError, match="adapts other layers than this run"):
        make_trainer(tiny_model_dir, **LORA, target_modules=("attn",), lora_adapter_path=tmp_path / "lora")
