"""The tiny model, its tokenizer and the sums, as a user of the saved files sees them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_rl.presets import tiny
from rewards import RewardRequest, score


def test_the_saved_model_loads_with_the_auto_classes(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    # Embedding 15x128, and 4 layers of q, o 128x128, k, v 64x128, three MLP matrices 384x128, and the norms.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128 + 2 * 128 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == 15 * 128 + 4 * layer + 128 == 789_760
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = GenerationConfig.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_the_tokenizer_is_one_token_a_character(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert len(tokenizer) == len(tiny.VOCABULARY) == 15
    ids = tokenizer("37+05=")["input_ids"]
    assert [tiny.VOCABULARY[i] for i in ids] == list("37+05=")
    assert tokenizer.decode([*ids, *tokenizer("42")["input_ids"], 2]) == "37+05=42<eos>"
    assert tokenizer.decode([7, 5, 2], skip_special_tokens=True) == "42"
    assert tokenizer("42<eos>")["input_ids"] == [7, 5, 2]
    with pytest.raises(Exception, match="UNK"):
        tokenizer("37 + 5")


def test_a_seed_gives_one_model_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = tiny.build_model(seed=1)
    assert torch.equal(torch.rand(3), expected)
    same, other = tiny.build_model(seed=1), tiny.build_model(seed=2)
    weights = [m.model.layers[3].mlp.up_proj.weight for m in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_sums_are_all_pairs_once_split_without_a_leak(tmp_path: Path) -> None:
    files = tiny.write_sums(tmp_path / "sums", seed=3)
    train, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (files.train, files.held_out)
    )
    assert (len(train), len(held_out)) == (9500, 500)
    pairs = Counter()
    sides: dict[frozenset[int], set[str]] = {}
    for side, rows in (("train", train), ("held_out", held_out)):
        for row in rows:
            a, b = row["prompt"].removesuffix("=").split("+")
            assert len(a) == len(b) == 2
            assert row["label"] == str(int(a) + int(b))
            pairs[int(a), int(b)] += 1
            sides.setdefault(frozenset({int(a), int(b)}), set()).add(side)
    assert pairs == Counter({(a, b): 1 for a in range(100) for b in range(100)})
    assert all(len(found) == 1 for found in sides.values())
    assert tiny.sum_rows(seed=3) == (train, held_out)
    assert tiny.sum_rows(seed=4)[1] != held_out
    with pytest.raises(ValueError, match="num_held_out"):
        tiny.sum_rows(num_held_out=10_000)


def test_the_math_reward_grades_the_sums() -> None:
    requests = [
        RewardRequest(prompt=row["prompt"], response=response, label=row["label"])
        for row, response in [
            (tiny.sum_row(37, 5), "42"),
            (tiny.sum_row(37, 5), "43"),
            (tiny.sum_row(37, 5), "4"),
            (tiny.sum_row(37, 5), "42="),
            (tiny.sum_row(0, 0), "0"),
            (tiny.sum_row(99, 99), "198"),
            (tiny.sum_row(99, 99), ""),
        ]
    ]
    assert score(requests, rm_type="math") == [1, 0, 0, 0, 1, 1, 0]
