"""The language model's rollout and evaluation, on the real local engine and the real graders."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from llm_rl.engines.local import LocalEngine
from llm_rl.evaluation import Evaluator, eval_sampling
from llm_rl.generation import GenerateFnInput, GenerateFnOutput, GenerateState, current_state, generate
from llm_rl.presets.tiny import build_tokenizer, write_model
from llm_rl.prompts import PromptEncoder
from llm_rl.rollout import LlmRollout, RolloutHooks, RolloutSettings, length_metrics
from llm_rl.sample import Sample, SamplingParams
from llm_rl.scoring import RewardScorer
from shared_runtime.data import DataError, PromptDataset, PromptRow, RolloutDataSource
from shared_runtime.engines.client import BatchingClient
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.rollout.event_loop import EventLoop
from shared_runtime.rollout.filters import check_reward_nonzero_std
from shared_runtime.rollout.types import RolloutError, RolloutFnTrainOutput
from shared_runtime.sample import Status

SAMPLING = SamplingParams(max_new_tokens=4)


async def digits(args: Any, sample: Sample) -> float:
    """The share of digits in the response: something that an untrained model gets by chance."""
    return sum(c.isdigit() for c in sample.response) / 4


class Setup:
    """A whole rollout around one engine."""

    def __init__(self, engine: LocalEngine, **settings: Any) -> None:
        rows = [PromptRow(f"{i:02d}+{i:02d}=", str(2 * i), {"row": i}) for i in range(20)]
        hooks = settings.pop("hooks", None)
        scorer = settings.pop("scorer", None) or RewardScorer(custom=digits)
        self.source = RolloutDataSource(PromptDataset(rows), Sample, n_samples_per_prompt=4, shuffle=True, seed=1)
        tokenizer = build_tokenizer()
        self.client: Any = BatchingClient(InProcessGroup(engine))
        self.state = GenerateState(
            "args", tokenizer, PromptEncoder(tokenizer), self.client, rollout_seed=1, max_context=64, weight_version=0
        )
        self.rollout = LlmRollout(
            source=self.source,
            state=self.state,
            scorer=scorer,
            sampling=SAMPLING,
            settings=RolloutSettings(rollout_batch_size=3, **settings),
            hooks=hooks,
        )

    def run(self, rollout_id: int = 0) -> Any:
        with EventLoop() as loop:
            return loop.run(self.rollout(rollout_id))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return LocalEngine(directory)


def test_a_rollout_and_its_numbers(engine: LocalEngine) -> None:
    result = Setup(engine).run()
    samples = [s for group in result.samples for s in group]
    assert [s.index for s in samples] == list(range(12))
    assert all(s.reward == sum(c.isdigit() for c in s.response) / 4 for s in samples)
    assert all(len(s.rollout_log_probs or []) == s.response_length for s in samples)
    metrics = result.metrics
    assert metrics["rollout/raw_reward"] == pytest.approx(sum(s.reward for s in samples) / 12)
    lengths = [s.response_length for s in samples]
    assert metrics["rollout/response_len/mean"] == pytest.approx(sum(lengths) / 12)
    assert metrics["rollout/response_len/max"] == max(lengths)
    truncated = [s for s in samples if s.tokens[-1] != 2]
    assert metrics["rollout/truncated_ratio"] == len(truncated) / 12
    assert metrics["rollout/removed_samples"] == 0
    assert metrics["perf/rollout_time"] > 0
    assert metrics["perf/reward_time"] >= 0
    assert metrics["perf/tokens_per_s"] == pytest.approx(sum(lengths) / metrics["perf/rollout_time"])


def test_the_same_seed_gives_the_same_rollout_and_a_resumed_one_goes_on(engine: LocalEngine) -> None:
    whole, resumed = Setup(engine), Setup(engine)
    first, second = whole.run(0), whole.run(1)
    assert first.samples != second.samples
    before = Setup(engine)
    assert before.run(0).samples == first.samples
    resumed.source.load_state_dict(json.loads(json.dumps(before.source.state_dict())))
    assert resumed.run(1).samples == second.samples


def test_filter_and_hooks(engine: LocalEngine) -> None:
    seen: list[int] = []

    def drop_long(args: Any, data: list[list[Sample]]) -> None:
        for group in data:
            group[0].remove_sample = True

    def look(args: Any, all_samples: list[list[Sample]], data_source: Any) -> None:
        seen.extend(group[0].group_index for group in all_samples)

    async def even(args: Any, sample: Sample) -> float:
        return float(sample.index % 2 == 0) if sample.group_index % 2 == 0 else 0.0

    hooks = RolloutHooks(dynamic_filter=check_reward_nonzero_std, sample_filter=drop_long, all_samples=look)
    setup = Setup(engine, hooks=hooks, scorer=RewardScorer(custom=even), over_sampling_batch_size=6)
    result = setup.run()
    assert [group[0].group_index for group in result.samples] == [0, 2, 4]
    assert seen == [0, 1, 2, 3, 4]
    assert result.metrics["rollout/dynamic_filter/drop_zero_std_0"] == 2
    assert result.metrics["rollout/surplus_groups"] == 1
    assert result.metrics["rollout/removed_samples"] == 3
    assert result.metrics["rollout/raw_reward"] == 0.5
    assert result.metrics["rollout/zero_std_groups"] == 0
    assert result.metrics["passrate/pass@1"] == 0.5
    assert result.metrics["passrate/pass@2"] == pytest.approx(1 - 1 / 6)
    assert result.metrics["passrate/pass@4"] == 1.0
    (group,) = setup.source.buffer
    assert group[0] == Sample(
        index=20, group_index=5, prompt=group[0].prompt, label=group[0].label, metadata=group[0].metadata
    )


async def shouting(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    sample.response = "9999"
    return sample


async def fan_out(input: GenerateFnInput) -> GenerateFnOutput:
    return GenerateFnOutput([input.sample, input.sample])


def test_custom_generate_functions(engine: LocalEngine) -> None:
    result = Setup(engine, hooks=RolloutHooks(generate_function=shouting)).run()
    assert {s.reward for group in result.samples for s in group} == {1.0}
    assert result.metrics["rollout/zero_std_groups"] == 1.0
    with pytest.raises(RolloutError, match="several training rows from one rollout are not supported yet"):
        Setup(engine, hooks=RolloutHooks(generate_function=fan_out)).run()


def test_custom_rollout_function(engine: LocalEngine) -> None:
    async def function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        groups = data_source.get_samples(2)
        for sample in (s for group in groups for s in group):
            await generate(args, sample, {"max_new_tokens": 2})
            sample.reward = float(rollout_id)
        assert current_state().args == args
        return RolloutFnTrainOutput(groups, {"mine/number": 1.0})

    result = Setup(engine, hooks=RolloutHooks(rollout_function=function)).run(7)
    assert len(result.samples) == 2
    assert result.metrics["rollout/raw_reward"] == 7.0
    assert result.metrics["mine/number"] == 1.0
    assert result.metrics["rollout/response_len/max"] <= 2


def test_bad_reward_names_its_sample_or_drops_it(engine: LocalEngine) -> None:
    async def nan(args: Any, sample: Sample) -> float:
        return math.nan if sample.index == 5 else 1.0

    with pytest.raises(RolloutError, match=r"reward of sample 5 \(group 1, prompt '\d\d\+\d\d='\) failed: it is nan"):
        Setup(engine, scorer=RewardScorer(custom=nan)).run()
    result = Setup(engine, scorer=RewardScorer(custom=nan), on_reward_error="drop").run()
    assert [[s.index for s in group] for group in result.samples][1] == [4, 6, 7]
    assert result.metrics["rollout/dropped_samples"] == 1


def test_group_reward(engine: LocalEngine) -> None:
    def rank(args: Any, samples: list[Sample]) -> list[float]:
        return [float(i) for i, _ in enumerate(samples)]

    result = Setup(engine, scorer=RewardScorer(custom=rank, group_rm=True)).run()
    assert [[s.reward for s in group] for group in result.samples] == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_rollouts_are_recorded_and_replayed(engine: LocalEngine, tmp_path: Path) -> None:
    template = str(tmp_path / "debug" / "rollout_{rollout_id}.jsonl")
    recorded = Setup(engine, save_debug_rollout_data=template).run(3)
    lines = (tmp_path / "debug" / "rollout_3.jsonl").read_text().splitlines()
    assert [json.loads(line).get("index", 0) for line in lines] == list(range(12))
    replayed = Setup(engine, load_debug_rollout_data=template)
    result = replayed.run(3)
    assert result.samples == recorded.samples
    assert result.metrics["rollout/raw_reward"] == recorded.metrics["rollout/raw_reward"]
    assert replayed.source.next_index == 0
    with pytest.raises(DataError, match=r"rollout_4.jsonl does not exist, so rollout 4 can't be replayed"):
        replayed.run(4)
    (tmp_path / "debug" / "rollout_5.jsonl").write_text(lines[0] + '\n{"indexx": 1}\n')
    with pytest.raises(DataError, match=r"rollout_5.jsonl:2: not a recorded sample"):
        replayed.run(5)


def evaluator(engine: LocalEngine, **options: Any) -> Evaluator:
    sets = {
        "small": PromptDataset([PromptRow(f"0{i}+01=", str(i + 1)) for i in range(5)]),
        "other": PromptDataset([PromptRow("11+11=", "22")]),
    }
    options = {"scorer": RewardScorer(rm_type="math"), "n_samples_per_eval_prompt": 2, **options}
    return Evaluator(sets=sets, state=Setup(engine).state, sampling=SAMPLING, **options)


def test_evaluation(engine: LocalEngine) -> None:
    result = asyncio.run(evaluator(engine, scorer=RewardScorer(custom=digits))(0))
    for name, count in (("small", 10), ("other", 2)):
        data = result.data[name]
        assert [s.index for s in data["samples"]] == list(range(count))
        assert result.metrics[f"eval/{name}"] == pytest.approx(sum(data["rewards"]) / count)
        assert result.metrics[f"eval/{name}/truncated_ratio"] == sum(data["truncated"]) / count
        assert [s.status is Status.TRUNCATED for s in data["samples"]] == data["truncated"]
        assert f"eval/{name}/pass@2" in result.metrics
    again = asyncio.run(evaluator(engine, scorer=RewardScorer(custom=digits))(9))
    assert again.metrics == result.metrics


def test_evaluation_with_hooks_and_built_in_reward(engine: LocalEngine) -> None:
    async def cheat(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Sample:
        sample = await generate(args, sample, params)
        sample.response = rf"\boxed{{{sample.label}}}" if evaluation else ""
        return sample

    result = asyncio.run(evaluator(engine, generate_function=cheat)(0))
    assert result.metrics["eval/small"] == 1.0

    def own(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        return {"mine": {"rewards": [0.0, 1.0], "truncated": [False, False], "samples": []}}

    assert asyncio.run(evaluator(engine, eval_function=own)(0)).metrics == {"eval/mine": 0.5}


def test_dropped_samples_of_an_evaluation(engine: LocalEngine) -> None:
    async def picky(args: Any, sample: Sample) -> float:
        if sample.prompt == "03+01=" or (sample.prompt == "04+01=" and sample.index % 2):
            raise KeyError("x")
        return 1.0

    result = asyncio.run(evaluator(engine, scorer=RewardScorer(custom=picky), on_reward_error="drop")(0))
    assert result.metrics["eval/small"] == 1.0
    assert result.metrics["eval/small/dropped_samples"] == 3
    assert len(result.data["small"]["samples"]) == 7


def test_sampling_of_an_evaluation_inherits() -> None:
    rollout = SamplingParams(10, temperature=0.7, top_p=0.9, top_k=5, stop=("x",))
    assert eval_sampling(rollout) == rollout
    assert eval_sampling(rollout, temperature=0.0, top_k=-1, max_response_len=3) == SamplingParams(
        3, temperature=0.0, top_p=0.9, top_k=-1, stop=("x",)
    )


def test_no_lengths_without_samples() -> None:
    assert length_metrics([], 1.0) == {}
