"""Packed and padded forwards against one sequence at a time."""

import numpy as np
import pytest
import torch
from fsdp_helpers import make_rows, row_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config

from llm_rl.algorithms.log_probs import log_probs_from_logits
from llm_rl.trainers.fsdp.attention import PACKED, packed_attention, register_packed_attention
from llm_rl.trainers.fsdp.forward import response_logits
from llm_rl.trainers.fsdp.packing import MAX_SCORES, pack_rows


@st.composite
def ragged_rows(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3))
    rows = draw(
        st.lists(st.tuples(st.sampled_from(prompts), st.lists(st.integers(0, 5), max_size=9)), min_size=1, max_size=12)
    )
    return [np.array(p + r) for p, r in rows], [len(r) for _, r in rows]


@settings(max_examples=200, deadline=None)
@given(ragged_rows(), st.booleans())
def test_every_token_attends_to_exactly_its_own_past(problem, share):
    tokens, responses = problem
    pack = pack_rows(tokens, responses, share_prompts=share)
    seen = {}
    base = 0
    for group in pack.groups:
        for b in range(len(group.queries)):
            for q in range(group.queries.shape[1]):
                seen[base + b * group.queries.shape[1] + q] = (group, b, q)
        base += group.queries.numel()
    at = 0
    for row, response in zip(tokens, responses, strict=True):
        prompt = len(row) - response
        for t in range(response):
            index = int(pack.predictors[at])
            at += 1
            assert pack.position_ids[index] == prompt - 1 + t
            group, b, q = seen[int(pack.restore[index])]
            assert int(group.queries[b, q]) == index
            keys = group.keys[b, : int(group.offsets[b]) + q + 1].tolist()
            assert pack.input_ids[keys].tolist() == row[: prompt + t].tolist()
            assert pack.position_ids[keys].tolist() == list(range(prompt + t))
    assert at == len(pack.predictors)
    assert pack.num_tokens <= sum(len(t) - (r > 0) for t, r in zip(tokens, responses, strict=True))
    if not share:
        assert pack.num_tokens == sum(len(t) - (r > 0) for t, r in zip(tokens, responses, strict=True))
        assert pack.cu_seqlens[-1] == pack.num_tokens


def test_shared_prompts_are_computed_once():
    prompt = np.arange(100)
    tokens = [np.concatenate([prompt, np.full(3, i)]) for i in range(8)]
    assert pack_rows(tokens, [3] * 8, share_prompts=True).num_tokens == 100 + 8 * 2
    assert pack_rows(tokens, [3] * 8).num_tokens == 8 * 102


def test_a_row_without_prompt_is_refused():
    with pytest.raises(ValueError, match="row 1 has 2 tokens and a response of 2"):
        pack_rows([np.arange(3), np.arange(2)], [1, 2])


def test_groups_stay_bounded():
    tokens = [np.zeros(600, dtype=np.int64)] * 40
    for group in pack_rows(tokens, [1] * 40).groups:
        assert len(group.queries) * group.queries.shape[1] * group.keys.shape[1] <= MAX_SCORES


def model_of(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """A random model: grouped queries, sliding windows, no grouped queries, or capped scores."""
    common = {"vocab_size": 15, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "max_position_embeddings": 1024}
    if kind == "gemma2":
        from transformers import Gemma2Config

        config = Gemma2Config(
            **common,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=7,
            attn_logit_softcapping=0.5,
            query_pre_attn_scalar=8,
        )
    elif kind == "llama":
        from transformers import LlamaConfig

        config = LlamaConfig(**common, num_key_value_heads=4)
    else:
        windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if kind == "window" else {}
        config = Qwen3Config(**common, num_key_value_heads=2, head_dim=8, **windows)
    torch.manual_seed(0)
    register_packed_attention()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():  # larger weights, so that attention is far from uniform and a leak would show
        for p in model.parameters():
            p.mul_(6 if p.ndim > 1 else 1)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "attention"),
    [(kind, PACKED) for kind in ("qwen3", "window", "llama", "gemma2")] + [("qwen3", "sdpa"), ("window", "sdpa")],
)
def test_log_probs_and_gradients_equal_single_sequences(kind, attention):
    model = model_of(kind, torch.float64)
    rows = make_rows(1, groups=3, group_size=3, responses=(1, 20))
    rows += make_rows(2, groups=2, group_size=2, prompts=(100, 140), responses=(1, 200))  # the long kernel
    expected = torch.cat([row_log_probs(model, row) for row in rows])
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (expected * upstream).sum().backward()
    reference = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention)
    logits = response_logits(
        model, [r["tokens"] for r in rows], [r["response_length"] for r in rows], attn_implementation=attention
    )
    targets = torch.cat([torch.as_tensor(r["tokens"][len(r["tokens"]) - r["response_length"] :]) for r in rows])
    found = log_probs_from_logits(logits, targets).log_probs
    # transformers computes norms, rotations and eager softmax in float32 inside a float64 model.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    (found * upstream).sum().backward()
    scale = max(float(g.abs().max()) for g in reference.values())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, reference[name], rtol=0, atol=2e-5 * scale, msg=name)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("short", [True, False])
def test_kernel_in_float64_equals_a_loop_over_documents(window, short, monkeypatch):
    monkeypatch.setattr("llm_rl.trainers.fsdp.attention.SHORT", 10**6 if short else 0)
    rows = make_rows(4, groups=4, group_size=4, prompts=(2, 30), responses=(1, 40))
    tokens, responses = [r["tokens"] for r in rows], [r["response_length"] for r in rows]
    pack = pack_rows(tokens, responses, share_prompts=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, pack.num_tokens, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    out, _ = packed_attention(None, q, k, v, None, pack=pack, sliding_window=window)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    found = torch.autograd.grad((out * upstream).sum(), (q, k, v))

    expected = torch.zeros_like(out)
    base, where = 0, {}
    for group in pack.groups:
        for b in range(len(group.queries)):
            for j in range(group.queries.shape[1]):
                where[base + b * group.queries.shape[1] + j] = group.keys[b, : int(group.offsets[b]) + j + 1]
        base += group.queries.numel()
    for token, place in enumerate(pack.restore.tolist()):
        keys = where[place][-(window or 10**6) :]
        for head in range(4):
            scores = k[0, head // 2, keys] @ q[0, head, token] / 8**0.5
            expected[0, token, head] = scores.softmax(0) @ v[0, head // 2, keys]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    reference = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    for a, b in zip(found, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_other_documents_do_not_change_a_document():
    """Resetting positions alone would still leak: here the neighbours change, and nothing else may."""
    model = model_of("qwen3", torch.float64)
    model.set_attn_implementation(PACKED)
    first, second = make_rows(5, groups=2, group_size=1)
    other = dict(second, tokens=(second["tokens"] + 1) % 15)

    def logits_of_second_position(rows):
        return response_logits(
            model, [r["tokens"] for r in rows], [r["response_length"] for r in rows], attn_implementation=PACKED
        )[-first["response_length"] :]

    torch.testing.assert_close(
        logits_of_second_position([second, first]), logits_of_second_position([other, first]), rtol=0, atol=0
    )


def test_without_rows_the_graph_still_reaches_every_parameter():
    model = model_of("qwen3", torch.float32)
    for attention in (PACKED, "sdpa"):
        model.set_attn_implementation(attention)
        logits = response_logits(model, [], [], attn_implementation=attention)
        assert logits.shape == (0, 15)
        logits.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        model.zero_grad()


def test_packed_attention_needs_a_pack():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="packed batches only"):
        packed_attention(None, x, x, x, None)
