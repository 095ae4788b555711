"""Weights on their way out: published, exported, tied."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import full_weights, make_rows, make_trainer, plan
from fsdp_reference import plain_model
from torch.distributed.checkpoint import FileSystemReader as DcpReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared_runtime.weight_sync.bucket import unpack


def test_published_weights_rebuild_the_model(tiny_model_dir):
    """Trained, exported in two buckets, loaded into a fresh model: identical weights and logits, still tied."""
    trainer = make_trainer(tiny_model_dir, lr=0.01)
    try:
        trainer.train(0, plan(make_rows())[0])
        metas = trainer.weight_metadata()
        names = [meta.name for meta in metas]
        assert "lm_head.weight" not in names  # tied to the embeddings: published once
        assert len(names) == len(set(names)) == len(list(plain_model(tiny_model_dir).named_parameters()))
        buckets = [trainer.export_bucket(tuple(names[:7]), 0), trainer.export_bucket(tuple(names[7:]), 1)]
        assert tuple(m for b in buckets for m in b.tensors) == tuple(metas)
        received = {meta.name: tensor for b in buckets for meta, tensor in unpack(b)}
        fresh = plain_model(tiny_model_dir)
        result = fresh.load_state_dict(received, strict=False)
        assert result.missing_keys == ["lm_head.weight"]
        assert not result.unexpected_keys
        weights = full_weights(trainer)
        for name, weight in fresh.named_parameters():
            torch.testing.assert_close(weight.detach(), weights[name], rtol=0, atol=0)
        assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
        changed = plain_model(tiny_model_dir)
        assert (changed.lm_head.weight - fresh.lm_head.weight).abs().max() > 1e-3  # the head moved too
        with pytest.raises(KeyError, match="nope, neither"):
            trainer.export_bucket(("model.norm.weight", "nope", "neither"), 0)
    finally:
        trainer.shutdown()


def test_a_resumed_trainer_goes_on_bit_for_bit(tiny_model_dir, tmp_path):
    """Weights, both moments, step counters and schedule: killed after two rollouts, resumed, the same numbers."""
    options = {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "cosine", "lr_decay_iters": 9, "lr_warmup_iters": 1}
    rollouts = [plan(make_rows(i, version=i), num_steps=2)[0] for i in range(4)]
    trainer = make_trainer(tiny_model_dir, **options)
    try:
        for i in range(2):
            trainer.train(i, rollouts[i])
        trainer.sleep()
        trainer.save(tmp_path)
        trainer.wake_up()
        expected = [trainer.train(i, rollouts[i]) for i in (2, 3)]
        weights = full_weights(trainer)
    finally:
        trainer.shutdown()
    resumed = make_trainer(tiny_model_dir, **options)
    try:
        resumed.load(tmp_path)
        assert [resumed.train(i, rollouts[i]) for i in (2, 3)] == expected
        for name, weight in full_weights(resumed).items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
        assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    finally:
        resumed.shutdown()
    keys = DcpReader(tmp_path / "shards").read_metadata().state_dict_metadata
    assert "model.model.embed_tokens.weight" in keys
    assert not [key for key in keys if "lm_head" in key]  # tied weights have one key


def test_hf_export_scores_the_same(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, lr=0.01)
    narrow = make_trainer(tiny_model_dir, train_dtype="bf16")
    try:
        trainer.train(0, plan(make_rows())[0])
        trainer.save_hf(tmp_path / "export")
        narrow.save_hf(tmp_path / "narrow")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert exported.dtype == torch.float32
        assert exported.lm_head.weight is exported.model.embed_tokens.weight
        for name, weight in full_weights(trainer).items():
            torch.testing.assert_close(dict(exported.named_parameters())[name].detach(), weight, rtol=0, atol=0)
        live = plain_model(tiny_model_dir)
        live.load_state_dict(full_weights(trainer), strict=False)
        ids = torch.arange(3, 15)[None]
        torch.testing.assert_close(exported(ids).logits, live(ids).logits, rtol=0, atol=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
        assert tokenizer.decode(tokenizer("37+05=").input_ids) == "37+05="
        assert exported.generation_config.eos_token_id == exported.config.eos_token_id

        assert {meta.dtype for meta in narrow.weight_metadata()} == {"bfloat16"}
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "narrow").dtype == torch.bfloat16
    finally:
        trainer.shutdown()
        narrow.shutdown()
