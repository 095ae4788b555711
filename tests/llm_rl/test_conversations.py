"""Loss masks of conversations: transformers' own marks, prefixes, and what can't be told."""

from __future__ import annotations

from typing import Any

import pytest
from test_prompts import byte_tokenizer

from llm_rl.conversations import ConversationEncoder
from llm_rl.presets.tiny import build_tokenizer
from llm_rl.prompts import PromptEncoder

TURN = "<|{{ m['role'] }}|>"
TEMPLATE = (
    "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "yes"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "so 42"},
]


def encoder(template: str | None, **options: Any) -> ConversationEncoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ConversationEncoder(PromptEncoder(tokenizer, **options))


def trained(encoder: ConversationEncoder, prompt: Any, response: Any = None) -> str:
    """The trained tokens as text, with `…` where others lie between."""
    row = encoder.encode(prompt, response)
    assert len(row.loss_mask) == len(row.tokens) - row.prompt_length
    parts, inside = "", True
    for token, flag in zip(row.tokens[row.prompt_length :], row.loss_mask, strict=True):
        parts += encoder.tokenizer.decode([token]) if flag else ("…" if inside else "")
        inside = bool(flag)
    return parts


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED])
def test_every_assistant_turn_through_its_end(template: str) -> None:
    assert trained(encoder(template), CHAT) == "yes</s>…so 42</s>"


def test_the_mask_is_the_one_of_transformers() -> None:
    subject = encoder(UNMARKED)
    row = subject.encode(CHAT)
    marked = encoder(TEMPLATE).tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [0] * row.prompt_length + list(row.loss_mask)
    assert list(row.tokens) == marked["input_ids"][: len(row.tokens)]
    assert mask == marked["assistant_masks"][: len(mask)]
    assert not any(marked["assistant_masks"][len(mask) :])


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED])
def test_with_a_response_only_that_is_trained(template: str) -> None:
    assert trained(encoder(template), CHAT[:4], "so 42") == "so 42</s>"
    assert trained(encoder(template), CHAT[:2], CHAT[2:]) == "yes</s>…so 42</s>"
    assert trained(encoder(template, apply_chat_template=True), "é?", "yes") == "yes</s>"


def test_the_prompt_is_what_generation_starts_from() -> None:
    subject = encoder(UNMARKED)
    row = subject.encode(CHAT[:2], "yes")
    assert row.tokens[: row.prompt_length] == subject.prompts.encode(CHAT[:2])


def test_plain_text() -> None:
    tokenizer = build_tokenizer()
    row = ConversationEncoder(PromptEncoder(tokenizer)).encode("37+05=", "42")
    assert tokenizer.decode(list(row.tokens)) == "37+05=42<eos>"
    assert (row.prompt_length, row.loss_mask) == (6, (1, 1, 1))


@pytest.mark.parametrize(
    ("template", "prompt", "response", "message"),
    [
        (UNMARKED, CHAT[:2], None, "no assistant turn"),
        (UNMARKED, "q", None, "no response"),
        (UNMARKED, "q", [{"role": "assistant", "content": "a"}], "the prompt is plain text"),
        (UNMARKED, CHAT[:2], 3, "the response is 3"),
        (None, CHAT, None, "no chat template"),
        ("{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}", CHAT, None, "renders message 2"),
    ],
)
def test_what_cannot_be_trained_on(template: Any, prompt: Any, response: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder(template).encode(prompt, response)
