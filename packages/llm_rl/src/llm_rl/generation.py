"""Generate functions: what they get, what they return, and the stock one of a single turn.

A generate function (`--custom-generate-function-path`) has one of two forms:

    async def generate(input: GenerateFnInput) -> GenerateFnOutput: ...
    async def generate(args, sample: Sample, sampling_params: dict) -> Sample: ...

Both reach the engine through a `GenerateState`: the first as `input.state`, the second through `current_state()`.
A multi-turn function calls `generate_turn` again and again, with `append_tokens` for what a tool said in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from llm_rl.prompts import PromptEncoder
from llm_rl.sample import FinishReason, GenerateOutput, GenerateRequest, Sample, SamplingParams
from shared_runtime.engines.contract import EngineClient
from shared_runtime.hooks import HookSpec, accepts, takes_keyword
from shared_runtime.rollout.types import RolloutError, name_sample
from shared_runtime.sample import Status

GENERATE_HOOK = HookSpec(
    ("args", "sample", "sampling_params"), is_async=True, alternative=HookSpec(("input",), is_async=True)
)

_STATUS = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


@dataclass
class GenerateState:
    """What a generate function needs besides its sample.

    Attributes:
        args: The run's flat arguments.
        tokenizer: The model's tokenizer.
        encoder: Prompts to token ids.
        client: The engines.
        rollout_seed: Every draw derives from it and the sample's index.
        max_context: Tokens that prompt and response may have together; `None` is no limit.
        stream: Keeps the draws of evaluation sets apart from each other and from training.
        weight_version: Version of the published weights, stamped on samples at dispatch; `None` if nobody says.
        replayed_temperature: Where the trainer replays the distribution that tokens were drawn from, the temperature at
            which it does.
    """

    args: Any
    tokenizer: Any
    encoder: PromptEncoder
    client: EngineClient
    rollout_seed: int = 0
    max_context: int | None = None
    stream: str = ""
    weight_version: int | None = None
    replayed_temperature: float | None = None


@dataclass
class GenerateFnInput:
    """Input of a generate function.

    Attributes:
        state: Engine, tokenizer, encoder.
        sample: The sample to generate for; `sample.prompt` is set, `sample.tokens` is empty.
        sampling_params: Fields of `SamplingParams`; a copy that may be changed.
        evaluation: Whether this is an evaluation rollout.
    """

    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Any:
        """The run's flat arguments."""
        return self.state.args


@dataclass
class GenerateFnOutput:
    """Output of a generate function: the sample, with tokens, response, log-probs, loss mask and status."""

    samples: Sample | list[Sample] = field(default_factory=list)


GenerateFunction = Callable[[GenerateFnInput], Awaitable[Sample]]

_STATE: ContextVar[GenerateState] = ContextVar("generate_state")


def current_state() -> GenerateState:
    """The state of the rollout that is running.

    Raises:
        RolloutError: Outside of a rollout.
    """
    try:
        return _STATE.get()
    except LookupError:
        raise RolloutError("there is no rollout running: generate functions get their engine from one") from None


def set_current_state(state: GenerateState) -> None:
    """Make `current_state` return this in the current task and in those it starts."""
    _STATE.set(state)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], *, evaluation: bool = False) -> Sample:
    """One turn: the prompt goes in, the response is put on the sample."""
    await generate_turn(current_state(), sample, SamplingParams(**sampling_params))
    return sample


async def single_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """The same in the newer form."""
    await generate_turn(input.state, input.sample, SamplingParams(**input.sampling_params))
    return GenerateFnOutput(input.sample)


async def generate_turn(state: GenerateState, sample: Sample, params: SamplingParams) -> GenerateOutput | None:
    """Send everything that stands on the sample as token ids and append what comes back.

    Nothing is decoded and encoded again between turns, so a token that does not survive that does not matter.
    `params.max_new_tokens` bounds the whole response, over all turns.

    Args:
        state: Engine, tokenizer, limits.
        sample: Starts with its encoded prompt where it has no tokens yet.
        params: How to sample.

    Returns:
        What the engine said, or `None` where no room was left (the sample is truncated then).

    Raises:
        ValueError: The prompt leaves no room.
        RolloutError: The engine's answer does not fit, or `params` are none that the trainer can replay.
    """
    if not sample.tokens:
        sample.tokens = list(state.encoder.encode(sample.prompt))
        sample.prompt_length = len(sample.tokens)
    position = len(sample.tokens) - sample.prompt_length
    room = params.max_new_tokens - position
    if state.max_context is not None:
        room = min(room, state.max_context - len(sample.tokens))
    if room < 1:
        if position == 0:
            raise ValueError(f"a prompt of {sample.prompt_length} tokens leaves no room in {state.max_context}")
        sample.status = Status.TRUNCATED
        return None
    if state.replayed_temperature is not None:
        _check_replayable(sample, params, state.replayed_temperature)
    if sample.weight_version_dispatched is None:
        sample.weight_version_dispatched = state.weight_version
    request = GenerateRequest(
        request_id=f"{state.stream}{sample.index}.{position}",
        input_ids=tuple(sample.tokens),
        params=params if room == params.max_new_tokens else _shortened(params, room),
        seed=sample_seed(state.rollout_seed, sample.index, state.stream, position),
    )
    output = await state.client.generate(request)
    _append(state, sample, output, params)
    return output


def append_tokens(sample: Sample, token_ids: Sequence[int]) -> None:
    """Append tokens that the model did not draw (a tool's answer): they are read, but not trained on."""
    response_length = sample.response_length
    sample.loss_mask = [*(sample.loss_mask or [1] * response_length), *[0] * len(token_ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or [0.0] * response_length), *[0.0] * len(token_ids)]
    if sample.rollout_topk_token_ids is not None and sample.rollout_topk_log_probs is not None:
        nobody_chose: list[list[Any]] = [[]] * len(token_ids)
        sample.rollout_topk_token_ids = [*sample.rollout_topk_token_ids, *nobody_chose]
        sample.rollout_topk_log_probs = [*sample.rollout_topk_log_probs, *nobody_chose]
    if sample.rollout_support_ids is not None:
        sample.rollout_support_ids = [*sample.rollout_support_ids, *([token] for token in token_ids)]
    sample.tokens = [*sample.tokens, *token_ids]


def adapt_generate_function(function: Callable[..., Awaitable[Any]]) -> GenerateFunction:
    """Bring either form to one: `GenerateFnInput` in, the sample out. Fan-out is refused when it happens."""
    if accepts(function, 3):
        with_evaluation = takes_keyword(function, "evaluation")

        async def old_form(input: GenerateFnInput) -> Sample:
            if with_evaluation:
                return await function(input.args, input.sample, input.sampling_params, evaluation=input.evaluation)
            return await function(input.args, input.sample, input.sampling_params)

        return old_form

    async def new_form(input: GenerateFnInput) -> Sample:
        output = await function(input)
        if not isinstance(output, GenerateFnOutput):
            kind = type(output).__name__
            raise TypeError(f"--custom-generate-function-path returned {kind}, expected GenerateFnOutput(samples=…)")
        # A list is passed on: the executor says that fan-out isn't supported.
        return output.samples  # type: ignore[return-value]

    return new_form


def sample_seed(rollout_seed: int, index: int, stream: str = "", position: int = 0) -> int:
    """Seed of one request in [0, 2^63): a function of global ids alone, so a resumed run draws the same.

    Args:
        rollout_seed: The run's seed.
        index: The sample's global index.
        stream: Empty for training, the set's name for evaluation.
        position: Response tokens that are there already; later turns draw afresh.
    """
    digest = hashlib.blake2b(f"{rollout_seed}/{stream}/{index}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _append(state: GenerateState, sample: Sample, output: GenerateOutput, params: SamplingParams) -> None:
    if len(output.log_probs) != len(output.output_ids):
        raise RolloutError(
            f"the engine gave {len(output.log_probs)} log-probs for {len(output.output_ids)} tokens of "
            f"{name_sample(sample)}"
        )
    before = sample.rollout_log_probs or []
    sample.tokens = [*sample.tokens, *output.output_ids]
    sample.rollout_log_probs = [*before, *output.log_probs]
    if params.top_logprobs_num:
        sample.rollout_topk_token_ids = [*(sample.rollout_topk_token_ids or []), *map(list, output.top_ids)]
        sample.rollout_topk_log_probs = [*(sample.rollout_topk_log_probs or []), *map(list, output.top_log_probs)]
    if params.return_sampling_mask:
        _check_support(sample, output)
        sample.rollout_support_ids = [*(sample.rollout_support_ids or []), *map(list, output.support_ids)]
    if sample.loss_mask is not None:
        sample.loss_mask = [*sample.loss_mask, *[1] * len(output.output_ids)]
    sample.response = state.tokenizer.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=True)
    sample.status = _STATUS[output.finish_reason]
    sample.weight_version_returned = output.weight_version


def _check_replayable(sample: Sample, params: SamplingParams, temperature: float) -> None:
    """Refuse sampling that a generate function has changed to what the trainer can't replay."""
    problem = None
    if params.temperature != temperature:
        problem = f"temperature {params.temperature} is not --rollout-temperature {temperature}"
    elif params.top_p < 1 and params.top_k < 1:
        problem = f"top_p {params.top_p} needs a positive top_k, which bounds the tokens to record"
    elif params.filtered and not params.return_sampling_mask:
        problem = "top_k and top_p need return_sampling_mask, which --rollout-top-k sets"
    if problem is not None:
        raise RolloutError(f"{name_sample(sample)} can't be replayed in training: {problem}")


def _check_support(sample: Sample, output: GenerateOutput) -> None:
    """Every token needs the tokens that it was drawn from, itself among them."""
    if len(output.support_ids) != len(output.output_ids):
        raise RolloutError(
            f"the engine gave {len(output.support_ids)} sampling supports for {len(output.output_ids)} tokens of "
            f"{name_sample(sample)}"
        )
    for position, (token, support) in enumerate(zip(output.output_ids, output.support_ids, strict=True)):
        if token not in support:
            raise RolloutError(
                f"{name_sample(sample)}: token {token} at position {position} is not in its sampling support"
            )


def _shortened(params: SamplingParams, max_new_tokens: int) -> SamplingParams:
    return replace(params, max_new_tokens=max_new_tokens)
