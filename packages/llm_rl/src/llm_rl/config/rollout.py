"""How responses are drawn, scored and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn."""

    apply_chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template."""
    rollout_max_response_len: int = 512
    """Most tokens of a response."""
    rollout_max_prompt_len: int | None = None
    """Longest prompt allowed. Unset: what the model's context leaves."""
    rollout_temperature: float = 1.0
    """Sampling temperature; training takes its log-probs at the same one."""
    rollout_top_p: float = 1.0
    """Nucleus mass; 1 disables. Below 1 training replays the sampling support, which needs --rollout-top-k."""
    rollout_top_k: int = -1
    """Keep the k likeliest tokens; -1 disables. Above 0 training replays the sampling support."""
    rollout_top_logprobs_num: int = 0
    """Likely tokens recorded at each position with their probabilities, for --loss-type score_centering."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own."""
    rollout_submission_granularity: Literal["group", "sample"] = "group"
    """What frees room under --rollout-max-in-flight: a finished group or a finished sample."""
    rollout_max_in_flight: int | None = None
    """At most this many samples are generated at once. Unset: all."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    eval_prompt_data: tuple[str, ...] = ()
    """Pairs of name and path: `--eval-prompt-data sums eval.jsonl`."""
    eval_interval: int | None = None
    """Rollouts between evaluations. Unset: before the first and after the last rollout."""
    n_samples_per_eval_prompt: int = 1
    """Responses per prompt."""
    eval_max_response_len: int | None = None
    """Unset: as in the rollout."""
    eval_temperature: float | None = None
    """Unset: as in the rollout."""
    eval_top_p: float | None = None
    """Unset: as in the rollout."""
    eval_top_k: int | None = None
    """Unset: as in the rollout."""
    eval_target: float | None = None
    """End the run when the first evaluation set scores at least this."""

    def sets(self) -> dict[str, str]:
        """Name to path."""
        words = self.eval_prompt_data
        return dict(zip(words[::2], words[1::2], strict=False))


@dataclass(frozen=True)
class RewardConfig:
    """Scoring."""

    rm_type: str | None = None
    """Built-in reward; `boxed_` before a name takes the last \\boxed{} first."""
    rm_url: str | None = None
    """Address of the service when --rm-type is remote_rm."""
    reward_key: str | None = None
    """Key of the training reward in rewards that are dicts. Unset: score."""
    group_rm: bool = False
    """Call the custom reward once for each group."""
    on_reward_error: Literal["raise", "drop"] = "raise"
    """A reward that fails or is not finite stops the run, or drops its sample and counts it."""
