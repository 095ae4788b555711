"""The other text graders: values worked out by hand from their formulas."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from rewards import (
    LabelError,
    RewardError,
    RewardRequest,
    UnknownRewardError,
    known_rm_types,
    needs_label,
    score,
)
from rewards.text import dapo, deepscaler, f1, format, gemma_math, gpqa


def one(name: str, response: Any, label: Any = None, **fields: Any) -> Any:
    return score([RewardRequest(response, label, **fields)], name)[0]


# dapo ---------------------------------------------------------------------------------------------------------------


def test_dapo_reads_the_last_answer_line_of_the_last_300_characters() -> None:
    right = {"score": 1.0, "acc": True, "pred": "34"}
    assert dapo.grade("So.\nAnswer: 34", "34") == right
    assert dapo.grade("Answer: 12\nno\nAnswer: 34", 34) == right
    assert dapo.grade("Answer: 34" + " " * 299, "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert dapo.grade("Answer: $\\boxed{34}$", "34")["acc"]
    assert dapo.grade("answer: 1,234", "1234")["acc"]
    assert dapo.grade("Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert dapo.grade("Answer: -5", "5")["score"] == -1.0
    assert dapo.grade("Answer: 0", 0)["score"] == 1.0


def test_dapo_strict_box_wants_the_box_in_the_last_100_characters() -> None:
    assert dapo.grade(r"Answer: 3 so \boxed{34}", "34", strict_box=True) == {"score": 1.0, "acc": True, "pred": "34"}
    assert dapo.grade(r"\boxed{34.0}", "34", strict_box=True)["score"] == -1.0
    assert dapo.grade(r"\boxed{34}" + " " * 100, "34", strict_box=True)["pred"] == "[INVALID]"
    assert score([RewardRequest(r"\boxed{34}", "34")], "dapo", options={"dapo": {"strict_box": True}})[0]["acc"]


# deepscaler, gemma_math ----------------------------------------------------------------------------------------------


def test_deepscaler_needs_the_end_of_the_reasoning() -> None:
    assert deepscaler.grade(r"<think>\boxed{1}</think> It is \boxed{\frac12}.", "0.5") == 1.0
    assert deepscaler.grade(r"### x ###Response \boxed{7}", 7) == 1.0
    assert deepscaler.grade(r"\boxed{7}", 7) == 0.0
    assert deepscaler.grade(r"\boxed{7}</think> seven", 7) == 0.0
    assert deepscaler.grade(r"</think>\boxed{1}</think>\boxed{7}", 7) == 1.0
    assert deepscaler.grade(r"</think>\boxed{7}", ["6", r"\boxed{7}"]) == 1.0


def test_gemma_math_grades_what_follows_the_thinking_channel() -> None:
    assert gemma_math.grade(r"<|channel>thought \boxed{7}<channel|>It is \boxed{42}", "42") == 1.0
    assert gemma_math.grade(r"\boxed{42}<channel|>It is \boxed{7}", "42") == 0.0
    assert gemma_math.grade(r"It is \boxed{42}", "42") == 1.0
    assert gemma_math.grade(r"42", "42") == 0.0


# f1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The cat sat.", "cat sat", 1.0),
        ("a cat sat on mats", "the cat", 2 * (1 / 4) * 1 / (1 / 4 + 1)),
        ("cat cat", "cat", 2 * 0.5 * 1 / 1.5),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("yes", "no", 0.0),
        ("yes sir", "yes", 0.0),
        ("Yes!", "yes", 1.0),
        ("red car", ["blue", "car"], 2 * 0.5 * 1 / 1.5),
        ("7", 7, 1.0),
    ],
)
def test_f1_is_the_overlap_of_words(response: str, label: Any, expected: float) -> None:
    assert f1.grade(response, label) == pytest.approx(expected, abs=1e-12)


# gpqa ---------------------------------------------------------------------------------------------------------------

CHOICES = {"choices": ["red shift", "blue shift", "no shift", "a blue shift of 2"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("The answer is B.", "B", None, 1.0),
        ("Answer: (C)", "C", None, 1.0),
        ("**Answer:** **D**", "D", None, 1.0),
        (r"so $\boxed{\text{B}}$", "B", None, 1.0),
        ("answer: b", "B", None, 1.0),
        ("I think the answer is A. No: the answer is B", "B", None, 1.0),
        ("<think>answer is A</think> C is correct", "C", None, 1.0),
        ("Neither A nor C: B", "B", None, 1.0),
        ("The answer is a number", "A", None, 0.0),
        ("I don't know", "I", None, 0.0),
        ("The answer is J", "J", None, 1.0),
        ("The answer is Z", "B", None, 0.0),
        ("the answer is B", 1, CHOICES, 1.0),
        ("the answer is B", "blue shift", CHOICES, 1.0),
        ("it is a blue shift", "blue shift", CHOICES, 1.0),
        ("it is a red shift or a blue shift", "blue shift", CHOICES, 0.0),
        ("The answer is C", "x", {"correct_letter": "c"}, 1.0),
    ],
)
def test_gpqa_letter_then_last_capital_then_text(response: str, label: Any, metadata: Any, expected: float) -> None:
    assert gpqa.grade(response, label, metadata) == expected


def test_gpqa_label_that_is_no_choice_names_the_sample() -> None:
    with pytest.raises(LabelError, match="sample 0: label 'E' is no letter of A, B, C, D"):
        one("gpqa", "The answer is E", "E", metadata=CHOICES)
    with pytest.raises(LabelError, match="sample 0: label 7 is no index of the 4 choices"):
        one("gpqa", "B", 7, metadata=CHOICES)


# random -------------------------------------------------------------------------------------------------------------


def test_random_is_a_fair_coin_that_can_be_seeded() -> None:
    random.seed(3)
    first = score([RewardRequest()] * 400, "random")
    random.seed(3)
    assert score([RewardRequest()] * 400, "random") == first
    assert set(first) == {0.0, 1.0}
    assert 150 < sum(first) < 250


def test_deterministic_random_is_the_parity_of_the_digest() -> None:
    for index in range(20):
        response, tokens = f"response {index}", [1, 2, index]
        expected = hashlib.sha256((str(tokens) + response).encode()).digest()[0] % 2
        assert one("deterministic_random", response, tokens=tokens) == expected
    assert one("deterministic_random", "x", prompt="p") == hashlib.sha256(b"px").digest()[0] % 2


# format -------------------------------------------------------------------------------------------------------------


def test_format_by_pattern_and_by_schema() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format.grade("<think>a\nb</think><answer>1</answer>", pattern=pattern) == 1.0
    assert format.grade("<think>a</think><answer>1</answer> tail", pattern=pattern) == 0.0
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert format.grade('text\n```json\n{"x": 1}\n```', json_schema=schema) == 1.0
    assert format.grade('{"x": "1"}', json_schema=schema) == 0.0
    assert format.grade("no json", json_schema=schema) == 0.0
    assert format.grade("[" * 90_000, json_schema=schema) == 0.0
    assert one("format", "abc", metadata={"pattern": "a.c"}) == 1.0


def test_format_pattern_that_backtracks_ends_in_time() -> None:
    assert format.grade("a" * 5000 + "b", pattern=r"(a|aa)+$") == 0.0


def test_format_errors_name_the_sample() -> None:
    with pytest.raises(LabelError, match=r"sample 0: .*needs a form"):
        one("format", "x")
    with pytest.raises(LabelError, match=r"sample 0: pattern '\(' is no regular expression"):
        one("format", "x", metadata={"pattern": "("})
    with pytest.raises(LabelError, match="json_schema is invalid"):
        one("format", "{}", metadata={"json_schema": {"type": "nonsense"}})


# ifbench ------------------------------------------------------------------------------------------------------------


def test_ifbench_follows_the_published_checks() -> None:
    pytest.importorskip("if_verifiable", reason="the extra tandem-rewards[ifbench] is not installed")
    ids = ["punctuation:no_comma", "length_constraints:number_words"]
    kwargs = [{"num_words": None}, {"relation": "at least", "num_words": 5, "keyword": None}]
    metadata = {"instruction_id_list": ids, "kwargs": kwargs}
    assert one("ifbench", "one two three four five", metadata=metadata) == 1.0
    assert one("ifbench", "one, two three four five", metadata=metadata) == 0.0
    assert one("ifbench", "a, b</think>one two three four five", metadata=metadata) == 1.0
    assert one("ifbench", "", metadata=metadata) == 0.0
    half = score([RewardRequest("a, b", metadata=metadata)], "ifbench", options={"ifbench": {"aggregation": "mean"}})
    assert half == [0.0]
    half = score([RewardRequest("a b", metadata=metadata)], "ifbench", options={"ifbench": {"aggregation": "mean"}})
    assert half == [0.5]
    palindromes = {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}]}
    assert one("ifbench", "nospace", metadata=palindromes) == 1.0
    assert one("ifbench", "no space", metadata=palindromes) == 0.0
    with pytest.raises(LabelError, match="sample 0: unknown instruction 'format:nonsense'"):
        one("ifbench", "x", metadata={"instruction_id_list": ["format:nonsense"], "kwargs": [{}]})
    with pytest.raises(LabelError, match="instruction_id_list is missing"):
        one("ifbench", "x", metadata={})


# score and the registry ---------------------------------------------------------------------------------------------


def test_a_batch_of_mixed_types_keeps_its_order() -> None:
    requests = [
        RewardRequest("cat", "cat", metadata={"rm_type": "f1"}),
        RewardRequest("5", "5"),
        RewardRequest("Answer: 5", "5", metadata={"rm_type": "dapo"}),
        RewardRequest("6", "5"),
        RewardRequest(r"\boxed{dog}", "cat", metadata={"rm_type": "boxed_f1"}),
    ]
    expected = [1.0, 1.0, {"score": 1.0, "acc": True, "pred": "5"}, 0.0, 0.0]
    assert score(requests, "math") == expected
    assert score([], "math") == []


def test_names_that_are_not_registered_name_the_nearest() -> None:
    with pytest.raises(UnknownRewardError, match="Did you mean 'math'"):
        score([RewardRequest("5", "5")], "maths")
    with pytest.raises(UnknownRewardError, match="Did you mean 'boxed_math'"):
        needs_label("boxed_mat")
    with pytest.raises(UnknownRewardError, match="boxed_ prefix reads text"):
        needs_label("boxed_ocr")
    with pytest.raises(RewardError, match=r"sample 0 has no reward.*--rm-type"):
        score([RewardRequest("5", "5")])


def test_which_rewards_need_a_label() -> None:
    needing = {name for name in known_rm_types() if needs_label(name)}
    assert needing == {"math", "dapo", "deepscaler", "gemma_math", "f1", "gpqa", "code"}
    assert needs_label("boxed_math")
    assert not needs_label("boxed_random")


@pytest.mark.parametrize("name", ["dapo", "deepscaler", "gemma_math", "f1", "gpqa", "code", "boxed_math"])
def test_a_missing_label_is_an_error_that_names_the_sample(name: str) -> None:
    requests = [RewardRequest("5", "5"), RewardRequest("5", None, sample_id=41)]
    with pytest.raises(LabelError, match=f"sample 41 has label None, and the {name} reward needs one"):
        score(requests, name)


@pytest.mark.parametrize(
    ("name", "label", "metadata"),
    [
        ("math", "5", "text"),
        ("math", "5", {"rm_type": ["math"]}),
        ("math", "5", {"rm_type": "maths"}),
        ("f1", True, None),
        ("gpqa", "B", {"choices": 5}),
        ("format", None, {"pattern": 5}),
        ("format", None, {"json_schema": 5}),
        ("ifbench", None, {"instruction_id_list": 5}),
        ("ifbench", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [5]}),
        ("code", {"inputs": 5, "outputs": [1]}, None),
    ],
)
def test_malformed_labels_and_metadata_name_the_sample(name: str, label: Any, metadata: Any) -> None:
    if name == "ifbench":
        pytest.importorskip("if_verifiable", reason="the extra tandem-rewards[ifbench] is not installed")
    requests = [RewardRequest("B", label, metadata=metadata, sample_id="s3")]
    with pytest.raises((LabelError, UnknownRewardError), match=r"^sample s3"):
        score(requests, name)


def test_options_that_a_reward_does_not_take_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown option .symbolik. of the math reward\. Did you mean .symbolic.\?"):
        score([RewardRequest("5", "5")], "math", options={"math": {"symbolik": False}})
    with pytest.raises(ValueError, match="unknown option 'frames' of the ocr reward"):
        score([RewardRequest(image=None)], "ocr", options={"ocr": {"frames": 2}})
    with pytest.raises(ValueError, match="unknown option 'response'"):
        score([RewardRequest("5", "5")], "math", options={"math": {"response": "5"}})
