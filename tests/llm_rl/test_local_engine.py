"""The local engine against plain forward passes and `generate` of the same model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_rl.engines.decode import Row
from llm_rl.engines.local import LocalEngine, RequestError
from llm_rl.engines.sampling import uniforms
from llm_rl.engines.stopping import StopRule, end_of_sequence_ids
from llm_rl.presets import tiny
from llm_rl.sample import FinishReason, GenerateOutput, GenerateRequest, SamplingParams

EOS = tiny.VOCABULARY.index(tiny.EOS)


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Fresh weights give nearly uniform tokens; larger ones give distributions that differ from place to place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0 if "embed" in name or "lm_head" in name or "wte" in name else 5.0)
    return model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    sharpen(tiny.build_model(seed=1)).save_pretrained(directory)
    tiny.build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> LocalEngine:
    return LocalEngine(model_dir)


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny.VOCABULARY.index(character) for character in text)


def decoded(output: GenerateOutput) -> str:
    return "".join(tiny.VOCABULARY[token] for token in output.output_ids)


def requests(*prompts: str, seeds: range | None = None, **params: Any) -> list[GenerateRequest]:
    params = {"max_new_tokens": 12} | params
    return [
        GenerateRequest(f"{prompt}#{seed}", encode(prompt), SamplingParams(**params), seed)
        for prompt in prompts
        for seed in (seeds or range(1))
    ]


def full_forward(model: PreTrainedModel, request: GenerateRequest, output: GenerateOutput) -> torch.Tensor:
    """Logits of every response token from one pass over prompt and response: no cache, no padding, (R, V) float64."""
    with torch.inference_mode():
        logits = model(torch.tensor([request.input_ids + output.output_ids])).logits[0]
    return logits[len(request.input_ids) - 1 : -1].double()


PROMPTS = ("37+05=", "1", "12+3", "99+99=", "0+0=1+1=2+")


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-6)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_plain_forward_pass(
    model_dir: Path, dtype: str, tolerance: float, temperature: float
) -> None:
    engine = LocalEngine(model_dir, dtype=dtype)
    asked = requests(*PROMPTS, seeds=range(6), temperature=temperature, max_new_tokens=20)
    outputs = engine.generate(asked)
    assert len({len(output.output_ids) for output in outputs}) > 3  # rows end at different lengths
    for request, output in zip(asked, outputs, strict=True):
        assert output.request_id == request.request_id
        expected = torch.log_softmax(full_forward(engine.model, request, output) / temperature, dim=-1)
        expected = expected.gather(1, torch.tensor(output.output_ids).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(output.log_probs, expected.numpy(), atol=tolerance)


class ByUniforms(LogitsProcessor):
    """Makes greedy `generate` take the token that inverse-CDF sampling with our uniforms takes."""

    def __init__(self, seeds: list[int], lengths: list[int]) -> None:
        self.seeds, self.lengths = np.array(seeds, dtype=np.uint64), np.array(lengths, dtype=np.uint64)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        cumulative = scores.double().softmax(-1).cumsum(-1)
        uniform = torch.from_numpy(uniforms(self.seeds, self.lengths)).unsqueeze(1)
        self.lengths += np.uint64(1)
        chosen = (cumulative <= uniform).sum(-1, keepdim=True)
        return torch.full_like(scores, -1.0).scatter(1, chosen, 1.0)


def generate_with_transformers(
    model: PreTrainedModel, asked: list[GenerateRequest], warpers: list[LogitsProcessor], count: int
) -> list[tuple[int, ...]]:
    width = max(len(request.input_ids) for request in asked)
    ids = torch.tensor([(0,) * (width - len(r.input_ids)) + r.input_ids for r in asked])
    mask = torch.tensor([[0] * (width - len(r.input_ids)) + [1] * len(r.input_ids) for r in asked])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=EOS)
    sequences = model.generate(
        ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList(warpers)
    )
    out = []
    for row in sequences[:, width:].tolist():
        out.append(tuple(row[: row.index(EOS) + 1] if EOS in row else row))
    return out


def test_greedy_equals_greedy_generate(engine: LocalEngine) -> None:
    asked = requests(*PROMPTS, temperature=0.0, max_new_tokens=25)
    outputs = engine.generate(asked)
    assert [o.output_ids for o in outputs] == generate_with_transformers(engine.model, asked, [], 25)
    for request, output in zip(asked, outputs, strict=True):
        expected = torch.log_softmax(full_forward(engine.model, request, output), dim=-1).max(dim=-1).values
        np.testing.assert_allclose(output.log_probs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 0.8), (1.3, 4, 0.9)])
def test_samples_equal_those_of_generate_with_the_same_uniforms(
    engine: LocalEngine, temperature: float, top_k: int, top_p: float
) -> None:
    asked = requests(*PROMPTS, seeds=range(8), temperature=temperature, top_k=top_k, top_p=top_p)
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers.append(ByUniforms([r.seed for r in asked], [len(r.input_ids) for r in asked]))
    expected = generate_with_transformers(engine.model, asked, warpers, 12)
    assert [output.output_ids for output in engine.generate(asked)] == expected


def test_what_a_request_gives_does_not_depend_on_its_batch(model_dir: Path, engine: LocalEngine) -> None:
    mixed = requests(*PROMPTS, seeds=range(4), max_new_tokens=15)
    mixed += requests("5+5=", seeds=range(3), temperature=0.5, top_p=0.9, max_new_tokens=3)
    mixed += requests("6", seeds=range(3), temperature=0.0, stop=("1",))
    together = engine.generate(mixed)
    in_threes = LocalEngine(model_dir, max_batch_size=3).generate(mixed)
    backwards = engine.generate(mixed[::-1])[::-1]
    alone = [engine.generate([request])[0] for request in mixed]
    for outputs in (in_threes, backwards, alone):
        for one, other in zip(together, outputs, strict=True):
            assert (one.request_id, one.output_ids, one.finish_reason) == (
                other.request_id,
                other.output_ids,
                other.finish_reason,
            )
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    # Bit for bit the same where only the order of arrival differs.
    assert backwards == together


def test_a_continued_response_draws_what_the_whole_one_would_have(engine: LocalEngine) -> None:
    asked = requests(*PROMPTS, seeds=range(20), max_new_tokens=10)
    wholes = [(r, o) for r, o in zip(asked, engine.generate(asked), strict=True) if len(o.output_ids) > 4]
    assert len(wholes) > 20
    starts = [
        GenerateRequest(r.request_id, r.input_ids + o.output_ids[:3], SamplingParams(max_new_tokens=7), r.seed)
        for r, o in wholes
    ]
    for (_, whole), rest in zip(wholes, engine.generate(starts), strict=True):
        assert whole.output_ids[3:] == rest.output_ids


def test_seeds_make_the_samples_of_a_group_differ(engine: LocalEngine) -> None:
    outputs = engine.generate(requests("1", seeds=range(64)))
    assert len({output.output_ids for output in outputs}) > 40


def test_end_of_sequence_may_be_several_ids_and_requests_add_their_own(tmp_path: Path) -> None:
    model = sharpen(tiny.build_model(seed=1))
    model.generation_config.eos_token_id = [EOS, encode("7")[0]]
    model.save_pretrained(tmp_path)
    tiny.build_tokenizer().save_pretrained(tmp_path)
    engine = LocalEngine(tmp_path)
    outputs = engine.generate(requests("1", seeds=range(40), max_new_tokens=30, stop_token_ids=encode("3")))
    ends = {decoded(output)[-1:] for output in outputs if output.finish_reason == FinishReason.STOP}
    assert {"7", "3", ">"} == ends  # ">" is the end of "<eos>"
    for output in outputs:
        *before, last = output.output_ids
        assert not set(before) & {EOS, *encode("73")}
        assert (output.finish_reason == FinishReason.STOP) == (last in {EOS, *encode("73")})
        assert output.finish_reason == FinishReason.STOP or len(output.output_ids) == 30


def test_the_response_ends_with_the_token_that_completes_a_stop_string(engine: LocalEngine) -> None:
    stop = ("1", "++", "=0")
    free = engine.generate(requests("1", seeds=range(40), max_new_tokens=30))
    stopped = engine.generate(requests("1", seeds=range(40), max_new_tokens=30, stop=stop))
    ended_by_string = 0
    for whole, cut in zip(free, stopped, strict=True):
        text = decoded(whole)
        ends = [text.index(s) + len(s) for s in stop if s in text]
        if ends:
            assert decoded(cut) == text[: min(ends)]
            assert cut.finish_reason == FinishReason.STOP
            ended_by_string += 1
        else:
            assert (cut.output_ids, cut.finish_reason) == (whole.output_ids, whole.finish_reason)
    assert ended_by_string > 10


class FakeTokenizer:
    """Tokens of several characters, decoded by joining them."""

    words = ("ab", "cd", "e", "", "xyz")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.words[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "stop", "ends"),
    [
        ([0, 1], ("bc",), True),
        ([0, 1], ("abcd",), True),
        ([0, 2, 1], ("bc",), False),
        ([0, 4], ("y",), True),
        ([0] * 200 + [1], ("abc",), True),
        ([1] + [0] * 200, ("cda",), False),  # it ended long ago, were it to end there
        ([0, 1], ("zz", "d"), True),
    ],
)
def test_stop_strings_begin_and_end_within_tokens(ids: list[int], stop: tuple[str, ...], ends: bool) -> None:
    rule = StopRule(frozenset(), FakeTokenizer())  # type: ignore[arg-type]
    request = GenerateRequest("r", (1,), SamplingParams(max_new_tokens=9, stop=stop), 0)
    assert rule(Row(request, 9, output_ids=ids)) is ends


def test_end_of_sequence_ids_are_those_of_all_sources() -> None:
    class Source:
        def __init__(self, value: object) -> None:
            self.eos_token_id = value

    assert end_of_sequence_ids(Source(3), Source([4, 5]), Source(None), object()) == {3, 4, 5}


def test_the_context_limits_the_response(model_dir: Path) -> None:
    engine = LocalEngine(model_dir, context_length=9)
    for prompt in ("123456", "12345678"):
        outputs = engine.generate(requests(prompt, seeds=range(30)))
        longest = max(outputs, key=lambda output: len(output.output_ids))
        assert len(longest.output_ids) == 9 - len(prompt)
        assert longest.finish_reason == FinishReason.LENGTH or longest.output_ids[-1] == EOS
    with pytest.raises(RequestError, match=r"'123456789#0' .* prompt of 9 tokens leaves no room in a context of 9"):
        engine.generate(requests("1", "123456789"))
    assert LocalEngine(model_dir).context_length == tiny.CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("a", (), SamplingParams(4), 0), "its prompt is empty"),
        (GenerateRequest("a", (3, 15, -1), SamplingParams(4), 0), r"15 token ids, not \[-1, 15\]"),
        (GenerateRequest("a", (3,), SamplingParams(0), 0), "max_new_tokens must be at least 1, got 0"),
        (
            GenerateRequest("a", (3,), SamplingParams(4, -0.5), 0),
            "temperature must be .* not negative, got -0.5",
        ),
        (GenerateRequest("a", (3,), SamplingParams(4, float("nan")), 0), "temperature .* got nan"),
        (GenerateRequest("a", (3,), SamplingParams(4, 1.0, 0.0), 0), r"top_p must lie in \(0, 1\], got 0.0"),
        (GenerateRequest("a", (3,), SamplingParams(4, top_k=0), 0), "top_k must be positive, or -1 for all, got 0"),
        (GenerateRequest("a", (3,), SamplingParams(4, stop=("",)), 0), "a stop string is empty"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(engine: LocalEngine, request_: GenerateRequest, message: str) -> None:
    with pytest.raises(RequestError, match=rf"request 'a' can't be answered: .*{message}"):
        engine.generate([*requests("1"), request_])


def test_no_requests_no_outputs(engine: LocalEngine) -> None:
    assert engine.generate([]) == []


def test_weights_that_are_not_numbers_are_an_error_that_names_the_request(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    with torch.no_grad():
        engine.model.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="request '1#0' are not numbers after 0 response tokens"):
        engine.generate(requests("1"))


def test_a_pause_waits_for_running_requests_and_refuses_new_ones(engine: LocalEngine) -> None:
    inside, go_on = threading.Event(), threading.Event()
    ends = engine._ends

    def wait(row: Row) -> bool:
        inside.set()
        assert go_on.wait(20)
        return ends(row)

    engine._ends = wait  # type: ignore[assignment]
    outputs: list[GenerateOutput] = []
    generating = threading.Thread(target=lambda: outputs.extend(engine.generate(requests("1"))))
    generating.start()
    assert inside.wait(20)
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    pausing.join(0.2)
    assert pausing.is_alive()
    go_on.set()
    pausing.join(20)
    assert not pausing.is_alive()
    generating.join(20)
    assert len(outputs) == 1
    engine._ends = ends
    with pytest.raises(RuntimeError, match="paused"):
        engine.generate(requests("1"))
    engine.resume()
    assert engine.generate(requests("1")) == outputs


def test_asleep_it_takes_no_requests_and_awake_it_gives_the_same(engine: LocalEngine) -> None:
    before = engine.generate(requests(*PROMPTS))
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(requests("1"))
    assert engine.health()["asleep"] is True
    engine.wake_up()
    assert engine.generate(requests(*PROMPTS)) == before


def test_health_says_what_is_served(engine: LocalEngine, model_dir: Path) -> None:
    facts = engine.health()
    assert facts["dtype"] == "float32"
    assert facts["num_parameters"] == 789_760
    assert facts["weight_version"] == 0
    assert facts["model"] == str(model_dir)


def test_bf16_is_close_to_a_bf16_forward_pass(model_dir: Path) -> None:
    engine = LocalEngine(model_dir, dtype="bf16")
    asked = requests(*PROMPTS, seeds=range(2))
    for request, output in zip(asked, engine.generate(asked), strict=True):
        expected = torch.log_softmax(full_forward(engine.model, request, output), dim=-1)
        expected = expected.gather(1, torch.tensor(output.output_ids).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(output.log_probs, expected.numpy(), atol=0.15)


SMALL: dict[str, Any] = {
    "vocab_size": len(tiny.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


@pytest.mark.parametrize(
    ("build", "config", "dtype", "tolerance"),
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=False), "fp32", 1e-5),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(**SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
            "fp32",
            1e-5,
        ),
        (
            GPT2LMHeadModel,
            GPT2Config(vocab_size=15, n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=EOS),
            "fp64",  # nothing inside is computed in less
            1e-11,
        ),
    ],
    ids=["llama", "gemma3-sliding-window", "gpt2"],
)
def test_other_families(
    tmp_path: Path,
    build: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    dtype: str,
    tolerance: float,
) -> None:
    torch.manual_seed(0)
    sharpen(build(config)).save_pretrained(tmp_path)
    tiny.build_tokenizer().save_pretrained(tmp_path)
    engine = LocalEngine(tmp_path, dtype=dtype)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=engine.model.dtype).eval()
    asked = requests(*PROMPTS, seeds=range(4), max_new_tokens=20)
    for request, output in zip(asked, engine.generate(asked), strict=True):
        expected = torch.log_softmax(full_forward(plain, request, output), dim=-1)
        expected = expected.gather(1, torch.tensor(output.output_ids).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(output.log_probs, expected.numpy(), atol=tolerance)


def test_what_could_be_drawn_is_reported(engine: LocalEngine, model_dir: Path) -> None:
    """The support and the likeliest tokens of each position, as plain warpers over a plain forward say."""
    params = SamplingParams(5, temperature=1.5, top_p=0.9, top_k=6, top_logprobs_num=3, return_sampling_mask=True)
    prompt = tuple(tiny.build_tokenizer()("12+34=", add_special_tokens=False)["input_ids"])
    requests = [GenerateRequest(str(i), prompt, params, seed=i) for i in range(4)]
    plain = GenerateRequest("plain", prompt, SamplingParams(5), seed=9)
    *outputs, without = engine.generate([*requests, plain])
    assert without.top_ids == without.support_ids == ()
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(6), TopPLogitsWarper(0.9)])
    for output in outputs:
        ids = torch.tensor([[*prompt, *output.output_ids]])
        with torch.no_grad():
            scores = warpers(ids, model(ids).logits[0, len(prompt) - 1 : -1])
        log_probs = scores.log_softmax(dim=1)
        assert len(output.support_ids) == len(output.top_ids) == len(output.output_ids)
        for position, token in enumerate(output.output_ids):
            expected = (scores[position] > -torch.inf).nonzero()[:, 0].tolist()
            assert list(output.support_ids[position]) == expected
            assert token in expected
            likeliest = scores[position].topk(min(3, len(expected))).indices.tolist()
            assert list(output.top_ids[position]) == likeliest
            values = log_probs[position, likeliest].tolist()
            assert list(output.top_log_probs[position]) == pytest.approx(values, abs=1e-4)
