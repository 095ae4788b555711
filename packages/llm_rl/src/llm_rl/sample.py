"""The language model's sample, the messages between rollout and engine, and the row that training reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from shared_runtime.sample import BaseSample


class TeacherTop(TypedDict):
    """Likely tokens at each of R response tokens: ids (R, K), -1 in unused slots, and the teacher's log-probs."""

    student_ids: list[list[int]]
    student_ids_log_probs: list[list[float]]
    teacher_ids: list[list[int]]
    teacher_ids_log_probs: list[list[float]]


@dataclass
class Sample(BaseSample):
    """A prompt and one response.

    Attributes:
        tokens: Prompt and response token ids, one behind the other.
        prompt_length: How many of `tokens` are the prompt.
        response: The decoded response.
        loss_mask: One 0/1 per response token; `None` means all 1. Tool output is 0.
        rollout_log_probs: Log-probability of each response token under the distribution it was sampled from.
        rollout_topk_token_ids: The likeliest tokens at each response token, where asked for; a tool's token has none.
        rollout_topk_log_probs: Their log-probabilities, under the distribution as above.
        rollout_support_ids: The tokens that top-k and top-p left to draw from at each response token, under filtered
            sampling; a tool's token has itself alone.
        teacher_log_probs: Log-probability of each response token under the remote teacher of on-policy distillation.
        teacher_top: What that teacher says of likely tokens, where several are compared at each position.
    """

    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    response: str = ""
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_topk_token_ids: list[list[int]] | None = None
    rollout_topk_log_probs: list[list[float]] | None = None
    rollout_support_ids: list[list[int]] | None = None
    teacher_log_probs: list[float] | None = None
    teacher_top: TeacherTop | None = None

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
        top_logprobs_num: Report this many of the likeliest tokens at each position, fewer where filters left fewer.
        return_sampling_mask: Report all tokens that the filters left at each position.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs_num: int = 0
    return_sampling_mask: bool = False

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


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
        top_ids: The likeliest tokens at each position, the first one first; empty where none were asked for.
        top_log_probs: Their log-probabilities under the distribution sampled from.
        support_ids: All tokens that could be drawn at each position; empty where they were not asked for.
    """

    request_id: str
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_log_probs: tuple[tuple[float, ...], ...] = ()
    support_ids: tuple[tuple[int, ...], ...] = ()


class TrainRow(TypedDict, total=False):
    """What the trainer reads of one sample. Sequences are numpy arrays; L is the total and R the response length."""

    tokens: object  # int64 (L,)
    response_length: int  # R
    loss_mask: object  # float32 (R,)
    reward: float  # after group normalisation
    raw_reward: float
    rollout_log_probs: object  # float32 (R,)
    teacher_log_probs: object  # float32 (R,)
    teacher_top: TeacherTop
    rollout_topk_token_ids: object  # int32 (R, K), -1 in unused slots
    rollout_topk_log_probs: object  # float32 (R, K), -inf in unused slots
    rollout_support_ids: object  # int32 (R, K), -1 in unused slots
    weight_version: int
    sample_index: int
