"""Supervised training through the same trainer, against the loss that transformers computes from labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fsdp_helpers import capture_gradients, make_trainer, plan
from fsdp_reference import assert_same_gradients, gradients, plain_model

from llm_rl.algorithms.segments import Segments
from llm_rl.algorithms.sft_loss import mask_through_eos
from llm_rl.trainers.fsdp.attention import PACKED
from llm_rl.trainers.fsdp.batch import collate
from llm_rl.trainers.fsdp.forward import response_logits
from llm_rl.trainers.fsdp.loss import old_log_probs

EOS, PAD = 2, 0


def row(tokens, response_length, mask, index=0):
    return {
        "tokens": np.array(tokens, dtype=np.int64),
        "response_length": response_length,
        "loss_mask": np.array(mask, dtype=np.float32),
        "sample_index": index,
    }


def label_loss(model, rows):
    """transformers' own loss: the mean over all labels that aren't -100, whatever row they are in."""
    width = max(len(r["tokens"]) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for i, r in enumerate(rows):
        length = len(r["tokens"])
        ids[i, :length] = torch.as_tensor(r["tokens"])
        attention[i, :length] = 1
        trained = np.concatenate([np.zeros(length - r["response_length"]), r["loss_mask"]]) != 0
        labels[i, :length][torch.as_tensor(trained)] = torch.as_tensor(r["tokens"][trained])
    return model(input_ids=ids, attention_mask=attention, labels=labels).loss


def step(directory, rows, **changes):
    trainer = make_trainer(directory, loss_type="sft_loss", calculate_per_token_loss=True, clip_grad=0.0, **changes)
    try:
        seen = capture_gradients(trainer)
        metrics = trainer.train(0, plan(rows, max_tokens_per_gpu=25)[0])
    finally:
        trainer.shutdown()
    return metrics, dict(seen)


@pytest.mark.parametrize("attention", [PACKED, "sdpa"])
def test_multi_turn_loss_divides_by_the_loss_mask(tiny_model_dir, attention):
    """Two turns with a masked tool output between them, beside a short row; the rollout temperature plays no part."""
    rows = [
        row([5, 6, 7, 8, EOS, 9, 10, 11, 12, EOS], 8, [1, 1, 1, 0, 0, 1, 1, 1], 0),
        row([5, 9, 13, 4, EOS], 3, [1, 1, 1], 1),
        row([5, 9, 13, 4, 4, 4, 3], 4, [0, 0, 1, 1], 2),
    ]
    metrics, found = step(tiny_model_dir, rows, attn_implementation=attention, rollout_temperature=0.3)
    model = plain_model(tiny_model_dir)
    loss = label_loss(model, rows)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(found, gradients(model, loss), rtol=0, atol=3e-6)
    assert "train/pg_loss" not in metrics


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_first_response_token_through_eos_is_trained(tiny_model_dir, pad):
    """Padding behind the first end of sequence changes nothing, with the pad id equal to eos too."""
    clean = [row([5, 6, 7, 8, EOS], 3, [1, 1, 1], 0), row([9, 4, 4, 11], 3, [1, 1, 1], 1)]
    responses = torch.tensor([7, 8, EOS, pad, pad, 4, 4, 11])
    mask = mask_through_eos(responses, Segments.of([5, 3]), {EOS}, pad_id=pad).numpy()
    padded = [row([5, 6, 7, 8, EOS, pad, pad], 5, mask[:5], 0), row([9, 4, 4, 11], 3, mask[5:], 1)]
    metrics, found = step(tiny_model_dir, padded)
    expected_metrics, expected = step(tiny_model_dir, clean)
    assert metrics["train/loss"] == pytest.approx(expected_metrics["train/loss"], rel=1e-6)
    assert_same_gradients(found, expected, rtol=0, atol=3e-6)
    model = plain_model(tiny_model_dir)
    assert metrics["train/loss"] == pytest.approx(label_loss(model, clean).item(), rel=1e-5)


def test_training_brings_the_loss_down(tiny_model_dir):
    """Tiny overfit: memorises two rows."""
    rows = [row([5, 6, 7, 8, EOS], 3, [1, 1, 1], 0), row([9, 4, 4, 11, EOS], 4, [1, 1, 1, 1], 1)]
    trainer = make_trainer(tiny_model_dir, loss_type="sft_loss", lr=3e-3)
    try:
        losses = [trainer.train(i, plan(rows)[0])["train/loss"] for i in range(30)]
    finally:
        trainer.shutdown()
    assert losses[0] > 2.0
    assert losses[-1] < 0.05


def test_attention_mask_comes_from_lengths(tiny_model_dir):
    """Lengths 5 and 3 with responses of 2 and 1, most of them masked in the loss."""
    seen = {}
    model = plain_model(tiny_model_dir)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    response_logits(model, [np.arange(5), np.arange(3)], [2, 1], attn_implementation="eager")
    assert seen["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert seen["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_old_log_probs_carry_no_gradient():
    batch = collate([row([5, 6, 7], 2, [1, 1])], [2], policy_version=0)
    current = torch.zeros(2, requires_grad=True)
    assert not old_log_probs(batch, current, use_rollout_logprobs=False).requires_grad
    batch.old_log_probs = torch.ones(2, requires_grad=True)
    old = old_log_probs(batch, current, use_rollout_logprobs=False)
    assert not old.requires_grad
    assert old.tolist() == [1, 1]
    with pytest.raises(ValueError, match="some rows have no rollout log-probs"):
        old_log_probs(batch, current, use_rollout_logprobs=True)


def test_cpu_offload_gives_the_same_update(tiny_model_dir):
    rows = [row([5, 6, 7, 8, EOS], 3, [1, 1, 1], 0)]
    _, plain = step(tiny_model_dir, rows)
    _, offloaded = step(tiny_model_dir, rows, fsdp_cpu_offload=True)
    assert_same_gradients(offloaded, plain, rtol=0, atol=0)
