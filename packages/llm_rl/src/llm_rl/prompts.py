"""Prompts as token ids, and the check of a whole prompt set before a run starts."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from shared_runtime.data.files import raise_problems
from shared_runtime.data.prompts import Prompt, PromptDataset, PromptRow

_CACHED_TOKENS = 1 << 20
_CHUNK = 512


class PromptEncoder:
    """Turns prompts into token ids as the model expects them.

    A string is encoded as it stands, with the tokenizer's own special tokens in front but never an end-of-sequence
    token behind, which would end the text before the response. With `apply_chat_template` a string is one user
    message. Lists of chat messages always go through the template; it opens the assistant's turn, or goes on with it
    where the last message is the assistant's (a prefilled answer).
    """

    def __init__(
        self, tokenizer: Any, *, apply_chat_template: bool = False, template_options: dict[str, Any] | None = None
    ) -> None:
        """Set up.

        Args:
            tokenizer: A Hugging Face tokenizer.
            apply_chat_template: Wrap plain strings too.
            template_options: Extra arguments of the template, such as `{"enable_thinking": False}`.

        Raises:
            ValueError: If the template is asked for and the tokenizer has none.
        """
        if apply_chat_template and not tokenizer.chat_template:
            raise ValueError("--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template")
        self.tokenizer = tokenizer
        self.apply_chat_template = apply_chat_template
        self.template_options = template_options or {}
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._cached_tokens = 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of one prompt; those encoded lately are remembered, so the samples of a group share the work.

        Raises:
            ValueError: If it gives no tokens, or chat messages meet a tokenizer without a template.
        """
        ids = self._cache.get(_key(prompt))
        if ids is None:
            ids = self.encode_batch([prompt])[0]
            self.remember(prompt, ids)
        return ids

    def remember(self, prompt: Prompt, ids: tuple[int, ...]) -> None:
        """Keep the token ids of a prompt for `encode`, as long as there is room."""
        key = _key(prompt)
        if key not in self._cache:
            self._cache[key] = ids
            self._cached_tokens += len(ids)
        while self._cached_tokens > _CACHED_TOKENS:
            self._cached_tokens -= len(self._cache.popitem(last=False)[1])

    def encode_batch(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of many prompts in one call of the tokenizer, without the cache."""
        plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and not self.apply_chat_template]
        chats = sorted(set(range(len(prompts))).difference(plain))
        result: list[tuple[int, ...]] = [()] * len(prompts)
        for positions, texts, special in (
            (plain, [prompts[i] for i in plain], True),
            (chats, [self._render(prompts[i]) for i in chats], False),
        ):
            if positions:
                encoded = self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
                for i, text, ids in zip(positions, texts, encoded, strict=True):
                    result[i] = self._checked(text, ids)
        return result

    def _render(self, prompt: Prompt) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not self.tokenizer.chat_template:
            raise ValueError("the prompt is a list of chat messages, but the tokenizer has no chat template")
        prefilled = messages[-1]["role"] == "assistant"
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **self.template_options,
        )

    def _checked(self, text: Any, ids: list[int]) -> tuple[int, ...]:
        eos = self.tokenizer.eos_token
        if ids and eos and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(eos):
            ids = ids[:-1]
        if not ids:
            raise ValueError("the prompt gives no tokens")
        return tuple(ids)


def _key(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def check_prompts(
    dataset: PromptDataset,
    encoder: PromptEncoder,
    *,
    max_context: int,
    max_response_len: int,
    max_prompt_len: int | None = None,
    check_row: Callable[[PromptRow], str | None] | None = None,
) -> int:
    """Check every prompt of a set before anything starts.

    Args:
        dataset: The prompts.
        encoder: As the rollout will encode them.
        max_context: Tokens that the model can attend to.
        max_response_len: Tokens that a response may take.
        max_prompt_len: Longest prompt allowed; by default what the response leaves of the context.
        check_row: What else is wrong with a row, such as a missing label; see `scoring.row_check`.

    Returns:
        Tokens of the longest prompt.

    Raises:
        DataError: With file and line of every prompt that is too long, can't be encoded, or lacks its label.
    """
    limit = max_context - max_response_len
    source = f"the context of {max_context} minus --rollout-max-response-len {max_response_len}"
    if max_prompt_len is not None and max_prompt_len < limit:
        limit, source = max_prompt_len, f"--rollout-max-prompt-len {max_prompt_len}"
    if limit < 1:
        raise ValueError(f"no room for a prompt: {source} leaves {limit} tokens")
    problems: list[str] = []
    longest = 0
    for start in range(0, len(dataset), _CHUNK):
        rows = dataset[start : start + _CHUNK]
        for offset, (row, ids) in enumerate(zip(rows, _encode_each(encoder, rows), strict=True)):
            where = dataset.where(start + offset)
            if isinstance(ids, str):
                problems.append(f"{where}: the tokenizer can't encode the prompt: {ids}")
            elif len(ids) > limit:
                problems.append(f"{where}: the prompt has {len(ids)} tokens, {source} leaves {limit}")
            else:
                longest = max(longest, len(ids))
                encoder.remember(row.prompt, ids)
            problem = check_row(row) if check_row is not None else None
            if problem is not None:
                problems.append(f"{where}: {problem}")
    raise_problems(problems)
    return longest


def _encode_each(encoder: PromptEncoder, rows: Sequence[PromptRow]) -> list[tuple[int, ...] | str]:
    """Token ids of each row, or why there are none."""
    try:
        return list(encoder.encode_batch([row.prompt for row in rows]))
    except Exception as error:
        if len(rows) == 1:
            return [str(error) or type(error).__name__]
        # One bad prompt fails the whole call: look for it in halves.
        half = len(rows) // 2
        return _encode_each(encoder, rows[:half]) + _encode_each(encoder, rows[half:])
