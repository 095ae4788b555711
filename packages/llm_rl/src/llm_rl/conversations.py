"""Given responses as token ids with the mask of what is trained: supervised and preference data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_rl.prompts import PromptEncoder
from shared_runtime.data.prompts import Prompt

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """One training sequence.

    Attributes:
        tokens: From the start through the last trained token.
        prompt_length: Tokens in front of the first trained one.
        loss_mask: 1 for each trained token behind the prompt, 0 for those of other turns.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[int, ...]


class ConversationEncoder:
    """Turns prompts with their responses into token ids and loss masks.

    Every assistant turn is trained, through the token that ends it. Where the chat template marks them with
    `{% generation %}`, these marks decide; elsewhere a turn is what it adds behind the opened turn, which is what the
    model sees when it generates.

    Args:
        prompts: How prompts are encoded; the same as in generation.
    """

    def __init__(self, prompts: PromptEncoder) -> None:
        self.prompts, self.tokenizer = prompts, prompts.tokenizer

    def encode(self, prompt: Prompt, response: Any = None) -> Conversation:
        """Encode one row.

        Args:
            prompt: A text or chat messages; without a response, messages with at least one assistant turn.
            response: Its response, a text or chat messages; only this is trained then. Around a plain text nothing is
                put but the end-of-sequence token behind.

        Raises:
            ValueError: If there is nothing to train on, or the template renders a conversation differently when it
                goes on.
        """
        chat = self.prompts.apply_chat_template or isinstance(prompt, list)
        if response is None:
            if isinstance(prompt, str):
                raise ValueError("the row has no response: chat messages, or a response under --label-key")
            return self._encode_messages(prompt, 0)
        if isinstance(response, list) and not chat:
            raise ValueError("the response is a list of chat messages, but the prompt is plain text")
        if not response or not isinstance(response, str | list):
            raise ValueError(f"the response is {response!r}, not a text or a list of chat messages")
        if isinstance(response, str) and not chat:
            return self._encode_text(str(prompt), response)
        opening: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        return self._encode_messages([*opening, *turns], len(opening))

    def _encode_text(self, prompt: str, response: str) -> Conversation:
        head = self.prompts.encode(prompt)
        tail = [*self.tokenizer(response, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Conversation((*head, *tail), len(head), (1,) * len(tail))

    def _encode_messages(self, messages: Messages, start: int) -> Conversation:
        """Train the assistant turns from message `start` on."""
        if not any(message.get("role") == "assistant" for message in messages[start:]):
            raise ValueError("there is no assistant turn to train on")
        if not self.tokenizer.chat_template:
            raise ValueError("the row has chat messages, but the tokenizer has no chat template")
        if "{% generation" in self.tokenizer.chat_template or "{%- generation" in self.tokenizer.chat_template:
            tokens, mask = self._marked(messages, start)
        else:
            tokens, mask = self._by_prefixes(messages, start)
        trained = [i for i, flag in enumerate(mask) if flag]
        if not trained or trained[0] == 0:
            raise ValueError("the chat template leaves nothing to train on, or nothing in front of it")
        first, end = trained[0], trained[-1] + 1
        return Conversation(tuple(tokens[:end]), first, tuple(mask[first:end]))

    def _marked(self, messages: Messages, start: int) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.prompts.template_options,
        )
        mask = list(encoded["assistant_masks"])
        if start:
            given = len(self._ids(messages[:start], opened=True))
            mask[:given] = [0] * given
        return list(encoded["input_ids"]), mask

    def _by_prefixes(self, messages: Messages, start: int) -> tuple[list[int], list[int]]:
        tokens = self._ids(messages, opened=False)
        mask = [0] * len(tokens)
        for number, message in enumerate(messages):
            if number < start or message.get("role") != "assistant":
                continue
            opened, closed = self._ids(messages[:number], opened=True), self._ids(messages[: number + 1], opened=False)
            for prefix in (opened, closed):
                if tokens[: len(prefix)] != prefix:
                    raise ValueError(
                        f"the chat template renders message {number} differently when the conversation goes on, so "
                        "its tokens can't be told: give a template with {% generation %} marks"
                    )
            end = self._through_eos(closed, len(opened))
            mask[len(opened) : end] = [1] * (end - len(opened))
        return tokens, mask

    def _through_eos(self, tokens: list[int], start: int) -> int:
        """Where a turn ends: behind its last end-of-sequence token; line breaks of the template follow it."""
        ends = [i for i in range(start, len(tokens)) if tokens[i] == self.tokenizer.eos_token_id]
        return ends[-1] + 1 if ends else len(tokens)

    def _ids(self, messages: Messages, *, opened: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opened, **self.prompts.template_options
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
