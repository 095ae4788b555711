"""`ifbench`: are the instructions about the form of the answer followed?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from rewards.request import LabelError, RewardError

_MAX_CHARACTERS = 100_000


def grade(
    response: str,
    metadata: Mapping[str, Any] | None,
    prompt: str | None = None,
    *,
    aggregation: Literal["all", "mean"] = "all",
) -> float:
    """1.0 if the response follows every instruction, else 0.0: the strict, prompt-level accuracy of the benchmarks.

    The checks are those of IFEval (https://arxiv.org/abs/2311.07911) and IFBench (https://arxiv.org/abs/2507.02833),
    from the package `if-verifiable`; nothing is fetched at run time. The text after the last `</think>` is checked.

    Args:
        response: What the model wrote. Nothing, or over 100,000 characters, scores 0.
        metadata: `instruction_id_list`, and `kwargs`, one mapping for each instruction (either may be JSON).
        prompt: For the instructions that ask for the prompt to be repeated.
        aggregation: `all`, or `mean`: the share of the instructions that are followed.

    Raises:
        LabelError: The metadata name no instruction, or one that is unknown.
        RewardError: A check needs NLTK data that is not installed.
    """
    identifiers, arguments = _instructions(metadata or {})
    text = response.rpartition("</think>")[2].strip()
    followed = 0
    for identifier, given in zip(identifiers, arguments, strict=True):
        check = _checker(identifier)(identifier)
        given = {key: value for key, value in given.items() if value is not None}
        try:
            check.build_description(**given)
            needed = check.get_instruction_args()
            if needed and "prompt" in needed and "prompt" not in given:
                check.build_description(prompt=prompt or (metadata or {}).get("prompt", ""))
        except Exception as error:
            raise LabelError(f"instruction {identifier} does not take kwargs {given!r:.200}: {error}") from error
        if text and len(text) <= _MAX_CHARACTERS:
            followed += _follows(check, text)
    return float(followed == len(identifiers)) if aggregation == "all" else followed / len(identifiers)


def _follows(check: Any, text: str) -> bool:
    try:
        return bool(check.check_following(text))
    except LookupError as error:
        if "nltk" not in str(error).lower():
            return False
        raise RewardError(
            "an instruction check needs NLTK data, which is not fetched at run time: run "
            "`python -m nltk.downloader punkt punkt_tab stopwords averaged_perceptron_tagger_eng`."
        ) from error
    except Exception:  # a check that trips over odd text is not followed
        return False


def _instructions(metadata: Mapping[str, Any]) -> tuple[list[str], list[Mapping[str, Any]]]:
    identifiers, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    try:
        identifiers = json.loads(identifiers) if isinstance(identifiers, str) else identifiers
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise LabelError(f"metadata.instruction_id_list or metadata.kwargs is no JSON: {error}") from error
    if not identifiers:
        raise LabelError("metadata.instruction_id_list is missing or empty")
    arguments = [entry or {} for entry in arguments] if arguments else [{}] * len(identifiers)
    if len(arguments) != len(identifiers):
        raise LabelError(f"metadata has {len(identifiers)} instructions and {len(arguments)} kwargs")
    return list(identifiers), arguments


@lru_cache(maxsize=256)
def _checker(identifier: str) -> Any:
    for registry in _registries():
        if identifier in registry:
            return registry[identifier]
    raise LabelError(f"unknown instruction {identifier!r}: neither IFEval nor IFBench has it")


@lru_cache(maxsize=1)
def _registries() -> tuple[dict[str, Any], ...]:
    import langdetect
    import nltk

    download = nltk.download
    nltk.download = lambda *_, **__: False  # if-verifiable 0.1 downloads data at import, and offers no other switch
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL
    finally:
        nltk.download = download
    langdetect.DetectorFactory.seed = 0  # its vote is random otherwise
    return IFEVAL, IFBENCH
