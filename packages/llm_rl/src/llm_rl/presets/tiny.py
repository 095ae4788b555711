"""The `tiny` preset: a Qwen3-architecture model that learns sums in a minute on two cores, made on the spot.

Nothing is downloaded: the model is initialised from a seed, its character tokenizer is built here, and the data set is
arithmetic. Prompts look like `37+05=`, the response is the plain number and the end-of-sequence token (`42<eos>`).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY: tuple[str, ...] = (PAD, BOS, EOS, *"0123456789", "+", "=")
CONTEXT_LENGTH = 512

NUM_HELD_OUT = 500
"""Held-out pairs out of the 10,000 there are."""


@dataclass(frozen=True)
class SumsFiles:
    """Where the data set lies: JSONL rows `{"prompt": "37+05=", "label": "42"}`."""

    train: Path
    held_out: Path


def build_config() -> Qwen3Config:
    """Hidden 128, MLP 384, 4 layers, 4 heads of 32, 2 key-value heads, tied embeddings: 0.79 M parameters."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
        dtype="float32",
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. A character outside the vocabulary is an error, not an unknown token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int = 0) -> PreTrainedModel:
    """The untrained model, float32, the same for the same seed; the global random state is left as it was."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(build_config())
    model.generation_config = GenerationConfig(
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )
    return model.eval()


def write_model(directory: Path, seed: int = 0) -> None:
    """Write model, generation config and tokenizer as an ordinary Hugging Face directory."""
    build_model(seed).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def sum_row(a: int, b: int) -> dict[str, str]:
    """One row of the data set; both operands have two digits, the label has as many as it needs."""
    return {"prompt": f"{a:02d}+{b:02d}=", "label": str(a + b)}


def sum_rows(seed: int = 0, num_held_out: int = NUM_HELD_OUT) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All ordered pairs of 0..99, shuffled and split: (train rows, held-out rows).

    `a+b` and `b+a` land on the same side, so that no held-out sum can be read off a training one.

    Raises:
        ValueError: If nothing would be left to train on.
    """
    unordered = [(a, b) for a in range(100) for b in range(a, 100)]
    rng = random.Random(seed)
    rng.shuffle(unordered)
    held_out: list[tuple[int, int]] = []
    train: list[tuple[int, int]] = []
    for a, b in unordered:
        both = [(a, b)] if a == b else [(a, b), (b, a)]
        (held_out if len(held_out) + len(both) <= num_held_out else train).extend(both)
    if not train or not num_held_out >= 0:
        raise ValueError(f"num_held_out must lie in [0, 9999], got {num_held_out}")
    rng.shuffle(train)
    rng.shuffle(held_out)
    return [sum_row(a, b) for a, b in train], [sum_row(a, b) for a, b in held_out]


def write_sums(directory: Path, seed: int = 0, num_held_out: int = NUM_HELD_OUT) -> SumsFiles:
    """Write `train.jsonl` and `held_out.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    files = SumsFiles(train=directory / "train.jsonl", held_out=directory / "held_out.jsonl")
    for path, rows in zip((files.train, files.held_out), sum_rows(seed, num_held_out), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files
