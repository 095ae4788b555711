"""When a response ends: token ids and strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llm_rl.engines.decode import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN = 8
"""Tokens decoded beyond the longest stop string, since a cut may change how the first ones are decoded."""


def end_of_sequence_ids(*sources: Any) -> frozenset[int]:
    """`eos_token_id` of configs and tokenizers, each an id, a list of them or nothing."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, Iterable):
            ids.update(int(token) for token in value)
        elif value is not None:
            ids.add(int(value))
    return frozenset(ids)


class StopRule:
    """Ends a row at the model's or the request's stop ids, or as soon as its text contains a stop string.

    A stop string may begin and end within tokens; the token that completes it stays whole. Only the end of the
    response is decoded, special tokens included.

    Args:
        eos_ids: Ids that end every response.
        tokenizer: Decodes responses of requests with stop strings.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.eos_ids = eos_ids
        self.tokenizer = tokenizer

    def __call__(self, row: Row) -> bool:
        """Whether the row's last token ends it."""
        params = row.request.params
        token = row.output_ids[-1]
        if token in self.eos_ids or token in params.stop_token_ids:
            return True
        if not params.stop:
            return False
        assert self.tokenizer is not None
        # A token has at least one byte, so this many of them reach back far enough.
        window = max(len(stop.encode()) for stop in params.stop) + _MARGIN
        text = self.tokenizer.decode(row.output_ids[-window:], skip_special_tokens=False)
        return any(stop in text for stop in params.stop)
