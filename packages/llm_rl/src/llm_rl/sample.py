"""The language model's sample, the messages between rollout and engine, and the row that training reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from shared_runtime.sample import BaseSample


@dataclass
class Sample(BaseSample):
    """A prompt and one response.

    Attributes:
        tokens: Prompt and response token ids, one behind the other.
        prompt_length: How many of `tokens` are the prompt.
        response: The decoded response.
        loss_mask: One 0/1 per response token; `None` means all 1. Tool output is 0.
        rollout_log_probs: Log-probability of each response token under the distribution it was sampled from.
    """

    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    response: str = ""
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None

    @property
    def response_length(self) -> int:
        """Number of response tokens."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the next token.

    Attributes:
        max_new_tokens: At most this many response tokens.
        temperature: 0 is greedy.
        top_p: Nucleus mass, 1 disables.
        top_k: Keep the k likeliest, -1 disables.
        stop: Strings that end the response (they stay part of it).
        stop_token_ids: Ids that end it, besides the model's own end-of-sequence ids.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class GenerateRequest:
    """One request. `seed` alone decides the draws: the same request under the same weights gives the same tokens."""

    request_id: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class GenerateOutput:
    """One answer.

    Attributes:
        request_id: The request's own id.
        output_ids: Response token ids, the end-of-sequence token included when it was drawn.
        log_probs: Log-probability of each under the distribution sampled from (after temperature, top-k, top-p).
        finish_reason: Why it ended.
        weight_version: Version of the weights that drew it.
    """

    request_id: str
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int


class TrainRow(TypedDict, total=False):
    """What the trainer reads of one sample. Sequences are numpy arrays; L is the total and R the response length."""

    tokens: object  # int64 (L,)
    response_length: int  # R
    loss_mask: object  # float32 (R,)
    reward: float  # after group normalisation
    raw_reward: float
    rollout_log_probs: object  # float32 (R,)
    weight_version: int
    sample_index: int
