"""Generate functions on the real local engine; scripted engines only for what a model can't be made to say."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llm_rl.engines.local import LocalEngine
from llm_rl.generation import (
    GENERATE_HOOK,
    GenerateFnInput,
    GenerateFnOutput,
    GenerateState,
    adapt_generate_function,
    append_tokens,
    current_state,
    generate,
    generate_turn,
    sample_seed,
    set_current_state,
    single_turn,
)
from llm_rl.presets.tiny import build_tokenizer, write_model
from llm_rl.prompts import PromptEncoder
from llm_rl.sample import FinishReason, GenerateOutput, GenerateRequest, Sample, SamplingParams
from shared_runtime.engines.client import BatchingClient
from shared_runtime.hooks import HookError, load_function
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.rollout.types import RolloutError
from shared_runtime.sample import Status

PARAMS = SamplingParams(max_new_tokens=6)


class Script:
    """Answers with given token ids, one list a request, and keeps the requests."""

    def __init__(self, *answers: list[int], reason: FinishReason = FinishReason.STOP) -> None:
        self.answers = list(answers)
        self.reason = reason
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        self.requests.append(request)
        ids = tuple(self.answers.pop(0))
        return GenerateOutput(request.request_id, ids, tuple(-0.5 for _ in ids), self.reason, 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def engine(tiny: Path) -> LocalEngine:
    return LocalEngine(tiny)


def state(client: Any, **options: Any) -> GenerateState:
    tokenizer = build_tokenizer()
    return GenerateState("args", tokenizer, PromptEncoder(tokenizer), client, **options)


def turn(context: GenerateState, sample: Sample, params: SamplingParams = PARAMS) -> GenerateOutput | None:
    return asyncio.run(generate_turn(context, sample, params))


def test_single_turn_on_the_real_engine(engine: LocalEngine) -> None:
    client: Any = BatchingClient(InProcessGroup(engine))
    context = state(client, rollout_seed=5, weight_version=0)
    sample = Sample(index=3, prompt="12+34=")
    output = asyncio.run(single_turn(GenerateFnInput(context, sample, asdict(PARAMS))))
    prompt = context.tokenizer.encode("12+34=")
    request = GenerateRequest("r", tuple(prompt), PARAMS, sample_seed(5, 3))
    (expected,) = engine.generate([request])
    assert output.samples is sample
    assert sample.tokens == [*prompt, *expected.output_ids]
    assert sample.rollout_log_probs == pytest.approx(list(expected.log_probs), abs=1e-6)
    assert sample.prompt_length == 6
    assert sample.response_length == len(expected.output_ids)
    assert sample.response == context.tokenizer.decode(list(expected.output_ids), skip_special_tokens=True)
    assert sample.status is (Status.COMPLETED if expected.finish_reason is FinishReason.STOP else Status.TRUNCATED)
    assert (sample.weight_version_dispatched, sample.weight_version_returned) == (0, 0)


def test_group_members_differ_and_a_restart_repeats_them(engine: LocalEngine) -> None:
    async def responses(stream: str) -> list[list[int]]:
        context = state(BatchingClient(InProcessGroup(engine)), rollout_seed=1, stream=stream)
        samples = [Sample(index=i, prompt="12+34=") for i in range(8)]
        await asyncio.gather(*(generate_turn(context, sample, PARAMS) for sample in samples))
        return [sample.tokens for sample in samples]

    first = asyncio.run(responses(""))
    assert first == asyncio.run(responses(""))
    assert len({tuple(tokens) for tokens in first}) > 4
    assert first != asyncio.run(responses("eval/sums/"))


def test_seeds_are_distinct_and_fixed() -> None:
    seeds = {
        sample_seed(seed, index, stream, position)
        for seed in (0, 1)
        for index in range(500)
        for stream in ("", "eval/a/")
        for position in (0, 7)
    }
    assert len(seeds) == 2 * 500 * 2 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 0) == sample_seed(0, 0, "", 0)


def test_next_turn_goes_on_from_token_ids() -> None:
    """The first answer ends in two pad tokens, which decoding drops: the second prompt has them all the same."""
    plus, equals, one, two, pad, eos = (
        build_tokenizer().convert_tokens_to_ids(t) for t in ["+", "=", "1", "2", "<pad>", "<eos>"]
    )
    script = Script([one, pad, pad], [two, eos])
    context = state(script, weight_version=4)
    sample = Sample(index=9, prompt="1+1=")
    first = turn(context, sample)
    assert first is not None
    append_tokens(sample, [plus, equals])
    context.weight_version = 5
    turn(context, sample)
    assert script.requests[1].input_ids == (one, plus, one, equals, one, pad, pad, plus, equals)
    assert script.requests[1].params.max_new_tokens == PARAMS.max_new_tokens - 5
    assert script.requests[0].seed != script.requests[1].seed
    assert sample.tokens == [one, plus, one, equals, one, pad, pad, plus, equals, two, eos]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert sample.response == "1+=2"
    assert sample.weight_version_dispatched == 4


def test_budget_and_context_end_a_response() -> None:
    script = Script([3, 4, 5, 6], [7, 8])
    sample = Sample(prompt="1+1=")
    context = state(script, max_context=10)
    turn(context, sample)
    assert script.requests[0].params.max_new_tokens == 6
    turn(context, sample)
    assert script.requests[1].params.max_new_tokens == 2
    assert turn(context, sample) is None
    assert sample.status is Status.TRUNCATED
    assert len(script.requests) == 2
    with pytest.raises(ValueError, match="a prompt of 4 tokens leaves no room in 4"):
        turn(state(script, max_context=4), Sample(prompt="1+1="))


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, Status.COMPLETED),
        (FinishReason.LENGTH, Status.TRUNCATED),
        (FinishReason.ABORT, Status.ABORTED),
    ],
)
def test_status(reason: FinishReason, status: Status) -> None:
    sample = Sample(prompt="1+1=")
    turn(state(Script([5], reason=reason)), sample)
    assert sample.status is status


def test_engine_that_forgets_log_probs() -> None:
    class Half(Script):
        async def generate(self, request: GenerateRequest) -> GenerateOutput:
            return GenerateOutput(request.request_id, (3, 4), (-1.0,), FinishReason.STOP, 0)

    with pytest.raises(RolloutError, match=r"1 log-probs for 2 tokens of sample 0 \(group 0, prompt '1\+1='\)"):
        turn(state(Half()), Sample(prompt="1+1="))


REPLAYED = SamplingParams(max_new_tokens=6, top_k=4, top_p=0.9, return_sampling_mask=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, r"temperature 0.5 is not --rollout-temperature 1.0"),
        ({"top_k": -1}, r"top_p 0.9 needs a positive top_k"),
        ({"return_sampling_mask": False}, r"need return_sampling_mask, which --rollout-top-k sets"),
    ],
)
def test_sampling_that_training_can_not_replay(changes: dict[str, Any], message: str) -> None:
    context = state(Script([3]), replayed_temperature=1.0)
    with pytest.raises(RolloutError, match=rf"sample 0 .* can't be replayed in training: .*{message}"):
        turn(context, Sample(prompt="1+1="), replace(REPLAYED, **changes))


def test_engine_that_forgets_supports() -> None:
    class Wrong(Script):
        supports: tuple[tuple[int, ...], ...] = ()

        async def generate(self, request: GenerateRequest) -> GenerateOutput:
            return replace(await super().generate(request), support_ids=self.supports)

    client = Wrong([3, 4], [3, 4])
    with pytest.raises(RolloutError, match="0 sampling supports for 2 tokens of sample 0"):
        turn(state(client), Sample(prompt="1+1="), REPLAYED)
    client.supports = ((3, 5), (5, 6))
    with pytest.raises(RolloutError, match="token 4 at position 1 is not in its sampling support"):
        turn(state(client), Sample(prompt="1+1="), REPLAYED)


async def old_form(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sampling_params["max_new_tokens"] = 2
    sample.metadata["args"] = args
    return await generate(args, sample, sampling_params)


async def old_form_with_evaluation(
    args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False
) -> Sample:
    sample.metadata["evaluation"] = evaluation
    return sample


async def new_form(input: GenerateFnInput) -> GenerateFnOutput:
    input.sample.metadata["evaluation"] = input.evaluation
    input.sample.metadata["args"] = input.args
    return GenerateFnOutput(input.sample)


async def forgets_to_wrap(input: GenerateFnInput) -> Sample:
    return input.sample


def not_async(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


async def neither(args: Any, sample: Sample) -> Sample:
    return sample


def call(function: Any, evaluation: bool = True) -> Sample:
    async def main() -> Sample:
        context = state(Script([3, 4]))
        set_current_state(context)
        sample = Sample(prompt="1+1=")
        return await adapt_generate_function(function)(GenerateFnInput(context, sample, asdict(PARAMS), evaluation))

    return asyncio.run(main())


def test_both_forms_are_adapted() -> None:
    old = call(old_form)
    assert (old.metadata, old.response_length) == ({"args": "args"}, 2)
    assert call(old_form_with_evaluation).metadata == {"evaluation": True}
    assert call(old_form_with_evaluation, evaluation=False).metadata == {"evaluation": False}
    assert call(new_form).metadata == {"evaluation": True, "args": "args"}
    with pytest.raises(TypeError, match="--custom-generate-function-path returned Sample, expected GenerateFnOutput"):
        call(forgets_to_wrap)


def test_the_hook_accepts_both_forms_and_nothing_else() -> None:
    import sys

    module = sys.modules[__name__]
    sys.modules["generate_hooks_under_test"] = module
    flag = "--custom-generate-function-path"
    for function in (old_form, old_form_with_evaluation, new_form):
        assert load_function(f"generate_hooks_under_test.{function.__name__}", flag, GENERATE_HOOK) is function
    for path in ("llm_rl.rollout.generate", "llm_rl.rollout.single_turn"):
        load_function(path, flag, GENERATE_HOOK)
    for function in (not_async, neither):
        with pytest.raises(HookError, match=r"or `async def \w+\(input\)`"):
            load_function(f"generate_hooks_under_test.{function.__name__}", flag, GENERATE_HOOK)


def test_no_engine_outside_a_rollout() -> None:
    with pytest.raises(RolloutError, match="no rollout running"):
        current_state()
