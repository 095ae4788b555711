"""Prompts to token ids, against the tokenizer's own functions, and the check of a whole set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llm_rl.presets.tiny import build_tokenizer
from llm_rl.prompts import PromptEncoder, check_prompts
from llm_rl.scoring import row_check
from shared_runtime.data import DataError, PromptDataset, PromptRow

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if not loop.last or add_generation_prompt %}"
    "<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(special: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte; `special` puts bos in front, or eos behind as T5's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if special is not None:
        backend.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def text(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def test_plain_strings_are_encoded_as_they_stand() -> None:
    tokenizer = build_tokenizer()
    assert PromptEncoder(tokenizer).encode("37+05=") == tuple(tokenizer.encode("37+05="))
    assert text(byte_tokenizer("<s> $A"), PromptEncoder(byte_tokenizer("<s> $A")).encode("a b")) == "<s>a b"


def test_no_end_of_sequence_token_before_the_response() -> None:
    tokenizer = byte_tokenizer("$A </s>")
    assert tokenizer.encode("hi")[-1] == tokenizer.eos_token_id
    assert text(tokenizer, PromptEncoder(tokenizer).encode("hi")) == "hi"
    plain = byte_tokenizer()
    assert text(plain, PromptEncoder(plain).encode("hi</s>")) == "hi</s>"


def test_chat_template() -> None:
    tokenizer = byte_tokenizer("<s> $A")
    tokenizer.chat_template = CHATML
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "é?"}]
    encoder = PromptEncoder(tokenizer, apply_chat_template=True)
    assert text(tokenizer, encoder.encode("q")) == "<|user|>q<end><|assistant|>"
    assert text(tokenizer, encoder.encode(chat)) == "<|system|>s<end><|user|>é?<end><|assistant|>"
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert encoder.encode(chat) == tuple(expected)
    # Without the flag messages still go through the template, strings do not.
    mixed = PromptEncoder(tokenizer).encode_batch([chat, "q", chat])
    assert mixed == [encoder.encode(chat), tuple(tokenizer.encode("q")), encoder.encode(chat)]


def test_a_prefilled_assistant_turn_is_gone_on_with() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    chat = [{"role": "user", "content": "3+7?"}, {"role": "assistant", "content": "3 + 7 ="}]
    ids = PromptEncoder(tokenizer).encode(chat)
    assert text(tokenizer, ids) == "<|user|>3+7?<end><|assistant|>3 + 7 ="


def test_template_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"--apply-chat-template: the tokenizer .* has no chat template"):
        PromptEncoder(build_tokenizer(), apply_chat_template=True)
    with pytest.raises(ValueError, match="list of chat messages, but the tokenizer has no chat template"):
        PromptEncoder(build_tokenizer()).encode([{"role": "user", "content": "hi"}])


def dataset(*rows: PromptRow) -> PromptDataset:
    return PromptDataset(rows, Path("sums.jsonl"))


def check(*rows: PromptRow, **options: Any) -> int:
    options = {"max_context": 20, "max_response_len": 10, **options}
    return check_prompts(dataset(*rows), PromptEncoder(byte_tokenizer("<s> $A")), **options)


def test_longest_prompt() -> None:
    assert check(PromptRow("a" * 9), PromptRow("bb")) == 10


def test_every_problem_has_its_line() -> None:
    with pytest.raises(DataError) as caught:
        check(
            PromptRow("a" * 9, "x", line=1),
            PromptRow("a" * 10, "x", line=3),
            PromptRow("fine", None, line=4),
            PromptRow("fine", None, {"rm_type": "random"}, line=5),
            PromptRow([{"role": "user", "content": "hi"}], 0, line=6),
            PromptRow("fine", "x", {"rm_type": "mathh"}, line=7),
            check_row=row_check("math"),
        )
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"sums.jsonl:{n}" for n in (3, 4, 6, 7)]
    assert "has 11 tokens, the context of 20 minus --rollout-max-response-len 10 leaves 10" in lines[0]
    assert "no label, which the reward math needs (--label-key)" in lines[1]
    assert "no chat template" in lines[2]
    assert "did you mean 'math'" in lines[3].lower()


def test_prompt_limit_of_the_user_and_no_room_at_all() -> None:
    with pytest.raises(DataError, match=r"has 6 tokens, --rollout-max-prompt-len 5 leaves 5"):
        check(PromptRow("a" * 5), max_prompt_len=5)
    with pytest.raises(ValueError, match="leaves 0 tokens"):
        check(PromptRow("a"), max_response_len=20)


def test_a_character_outside_the_vocabulary_names_its_line() -> None:
    rows = [PromptRow("1+1=", line=i + 1) for i in range(600)]
    rows[555] = PromptRow("1-1=", line=556)
    with pytest.raises(DataError, match=r"^sums.jsonl:556: the tokenizer can't encode the prompt: .*$"):
        check_prompts(dataset(*rows), PromptEncoder(build_tokenizer()), max_context=512, max_response_len=8)


def test_no_reward_at_all() -> None:
    assert row_check(None)(PromptRow("a")) == "no reward: give --rm-type, or metadata.rm_type in the row"
    assert row_check(None)(PromptRow("a", metadata={"rm_type": "random"})) is None
    assert row_check("math")(PromptRow("a", 0)) is None


def test_checked_prompts_are_not_encoded_again_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    import llm_rl.prompts as module

    encoder = PromptEncoder(build_tokenizer())
    rows = [PromptRow(f"{i}+{i}=") for i in range(10, 30)]
    expected = encoder.encode_batch([row.prompt for row in rows])
    calls: list[Any] = []
    real = encoder.encode_batch
    monkeypatch.setattr(encoder, "encode_batch", lambda prompts: calls.append(len(prompts)) or real(prompts))
    check_prompts(dataset(*rows), encoder, max_context=512, max_response_len=8)
    assert [encoder.encode(row.prompt) for row in rows] == expected
    assert calls == [20]
    monkeypatch.setattr(module, "_CACHED_TOKENS", 60)
    encoder.encode("1+1=")
    # Room for 9 of the 6-token prompts besides the new one: the latest of them are still there.
    assert [encoder.encode(row.prompt) for row in rows[11:]] == expected[11:]
    assert calls == [20, 1]
    encoder.encode(rows[0].prompt)
    assert calls == [20, 1, 1]
