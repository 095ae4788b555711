"""Sampling supports and candidates, from the engine that records them to the trainer's loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from fsdp_helpers import capture_gradients, make_trainer, plan
from fsdp_reference import assert_same_gradients, gradients, plain_model

from llm_rl.engines.local import LocalEngine
from llm_rl.generation import GenerateState, append_tokens, generate_turn
from llm_rl.presets.tiny import VOCABULARY, build_tokenizer
from llm_rl.prompts import PromptEncoder
from llm_rl.sample import Sample, SamplingParams
from llm_rl.train_data import sample_to_row
from shared_runtime.engines.client import BatchingClient
from shared_runtime.placement.groups import InProcessGroup

TOLERANCE = 3e-6
TEMPERATURE = 3.0
FILTERED = SamplingParams(6, temperature=TEMPERATURE, top_p=0.9, top_k=5, return_sampling_mask=True)


@pytest.fixture
def start():
    """Start trainers; they are shut down at the end."""
    started = []

    def build(directory, **changes):
        started.append(make_trainer(directory, clip_grad=0.0, **changes))
        return started[-1]

    yield build
    for trainer in started:
        trainer.shutdown()


@pytest.fixture(scope="module")
def rollout(tiny_teacher_dir):
    """Rows of two-turn samples, with a tool's tokens in between, that the teacher model drew."""
    tokenizer, client = build_tokenizer(), BatchingClient(InProcessGroup(LocalEngine(tiny_teacher_dir)))
    tool = tokenizer("+3", add_special_tokens=False)["input_ids"]

    def draw(params: SamplingParams, num_candidates: int = 0, count: int = 6) -> list[dict]:
        state = GenerateState(
            None, tokenizer, PromptEncoder(tokenizer), client, replayed_temperature=params.temperature
        )

        async def one(index: int) -> Sample:
            sample = Sample(index=index, prompt=f"{10 + index}+07=")
            await generate_turn(state, sample, replace(params, max_new_tokens=3))
            append_tokens(sample, tool)
            await generate_turn(state, sample, replace(params, max_new_tokens=9))
            return sample

        async def everything() -> list[Sample]:
            return await asyncio.gather(*map(one, range(count)))

        samples = asyncio.run(everything())
        return [dict(sample_to_row(s, s.index - 2.3, 0.0, num_candidates=num_candidates)) for s in samples]

    return draw


def gradient_of(trainer, rows, **layout):
    """Metrics and gradient of one optimizer step that isn't taken."""
    seen = capture_gradients(trainer)
    metrics = trainer.train(0, plan(rows, **layout)[0])
    return metrics, dict(seen)


def row_logits(model, row) -> torch.Tensor:
    """(R, V) of a row's response from a plain forward of that sequence alone."""
    tokens = torch.as_tensor(row["tokens"])[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits[len(row["tokens"]) - 1 - row["response_length"] :]


def test_the_trainer_has_the_engines_probabilities_under_replay_and_not_without(start, rollout, tiny_teacher_dir):
    rows = rollout(FILTERED)
    assert all((row["loss_mask"] == 0).sum() == 2 for row in rows)
    sizes = {int(n) for row in rows for n in (row["rollout_support_ids"] >= 0).sum(axis=1)[row["loss_mask"] != 0]}
    assert len(sizes) > 1  # top-p cuts differently from place to place
    trainer = start(tiny_teacher_dir, rollout_temperature=TEMPERATURE)
    metrics, whole = gradient_of(trainer, rows)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    metrics, found = gradient_of(trainer, rows, max_tokens_per_gpu=None, micro_batch_size=1)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert_same_gradients(found, whole, rtol=0, atol=TOLERANCE)
    for row in rows:
        del row["rollout_support_ids"]
    metrics, _ = gradient_of(trainer, rows)
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01


def test_the_replayed_gradient_against_plain_loops(start, rollout, tiny_model_dir):
    """Over each token's support alone, entropy included, with weights other than those that drew."""
    rows = rollout(FILTERED)
    model = plain_model(tiny_model_dir, torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits, start_of = row_logits(model, row) / TEMPERATURE, len(row["tokens"]) - row["response_length"]
        trained = row["loss_mask"].nonzero()[0]
        for t in trained:
            support = [int(i) for i in row["rollout_support_ids"][t] if i >= 0]
            log_q = logits[t, support].log_softmax(0)
            log_prob = log_q[support.index(int(row["tokens"][start_of + t]))]
            entropy = -(log_q.exp() * log_q).sum()
            value = -row["reward"] * (log_prob - log_prob.detach()).exp() - 0.1 * entropy
            loss = loss + value / (len(trained) * len(rows))
    expected = gradients(model, loss)
    _, found = gradient_of(start(tiny_model_dir, rollout_temperature=TEMPERATURE, entropy_coef=0.1), rows)
    assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_score_centering_against_the_whole_distribution(start, rollout, tiny_model_dir, mode):
    """All tokens are candidates, so there is no tail: -A·(w·log p(t) - Σ_a q(a)·w(a)·log p(a)), weights detached."""
    vocabulary = len(VOCABULARY)
    rows = rollout(SamplingParams(6, temperature=TEMPERATURE, top_logprobs_num=vocabulary), vocabulary)
    model = plain_model(tiny_model_dir, torch.float64)
    weigh = {
        "none": torch.ones_like,
        "tis": lambda r: r.clamp(max=1.5),
        "mis": lambda r: r * ((r >= 0.5) & (r <= 5)),
    }[mode]
    loss, trained_tokens = torch.zeros((), dtype=torch.float64), sum(int(row["loss_mask"].sum()) for row in rows)
    for row in rows:
        log_p = (row_logits(model, row) / TEMPERATURE).log_softmax(1)
        tokens = row["tokens"][-row["response_length"] :]
        for t in row["loss_mask"].nonzero()[0]:
            ids = torch.as_tensor(row["rollout_topk_token_ids"][t]).long()
            q = torch.as_tensor(row["rollout_topk_log_probs"][t]).double().exp()
            p = log_p[t, ids]
            ratio = weigh(p.detach().exp() / q)
            own = int((ids == int(tokens[t])).nonzero()[0, 0])
            score = ratio[own] * p[own] - (q * ratio * p).sum()
            loss = loss - row["reward"] * score / trained_tokens
    expected = gradients(model, loss)
    settings = {"score_centering_is": mode, "score_centering_tis_clip": 1.5, "calculate_per_token_loss": True}
    trainer = start(tiny_model_dir, rollout_temperature=TEMPERATURE, loss_type="score_centering", **settings)
    for layout in ({}, {"max_tokens_per_gpu": None, "micro_batch_size": 2}):
        metrics, found = gradient_of(trainer, rows, **layout)
        assert_same_gradients(found, expected, rtol=0, atol=TOLERANCE)
    assert metrics["train/train_rollout_kl"] > 0.01
    assert metrics["train/sc_rollout_head_mass"] == pytest.approx(1, abs=1e-5)


def test_score_centering_of_filtered_rollouts_has_no_tail(start, rollout, tiny_model_dir, tiny_teacher_dir):
    rows = rollout(replace(FILTERED, top_logprobs_num=8), 8)
    settings = {"rollout_temperature": TEMPERATURE, "loss_type": "score_centering"}
    metrics, _ = gradient_of(start(tiny_model_dir, use_kl_loss=True, **settings), rows)
    for mass in ("sc_train_head_mass", "sc_rollout_head_mass", "sc_tail_ratio"):
        assert metrics[f"train/{mass}"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/kl_invalid_fraction"] == 0
    metrics, _ = gradient_of(start(tiny_teacher_dir, **settings), rows)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert abs(metrics["train/sc_correction"]) < 1e-5  # nothing to centre on-policy


def test_micro_batches_of_centred_scores_do_not_matter(start, rollout, tiny_model_dir):
    rows = rollout(SamplingParams(6, temperature=TEMPERATURE, top_logprobs_num=4), 4)
    trainer = start(
        tiny_model_dir, rollout_temperature=TEMPERATURE, loss_type="score_centering", score_centering_is="mis"
    )
    whole_metrics, whole = gradient_of(trainer, rows)
    assert whole_metrics["train/sc_rollout_head_mass"] < 0.99
    metrics, found = gradient_of(trainer, rows, max_tokens_per_gpu=None, micro_batch_size=1)
    assert_same_gradients(found, whole, rtol=0, atol=TOLERANCE)
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_supports_larger_than_the_candidates_are_refused(rollout):
    with pytest.raises(ValueError, match=r"was drawn from [345] that top-k and top-p had left, more than the 2 of"):
        rollout(replace(FILTERED, top_logprobs_num=2), 2)


def test_rows_without_candidates_are_refused(start, rollout, tiny_model_dir):
    with pytest.raises(ValueError, match="has no candidates of --rollout-top-logprobs-num"):
        rollout(SamplingParams(6), 4)
    rows = rollout(SamplingParams(6, top_logprobs_num=4), 4)
    del rows[2]["rollout_topk_token_ids"]
    trainer = start(tiny_model_dir, loss_type="score_centering")
    with pytest.raises(ValueError, match="sample 2 lacks rollout_topk_token_ids"):
        trainer.train(0, plan(rows)[0])
