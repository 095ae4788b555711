"""Batches in which what can't be scored fails alone, and what is wrong with a row before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rewards.registry import get_spec, needs_label
from rewards.request import RewardRequest, RewardServiceError, Score, UnknownRewardError
from rewards.scoring import Options, score

_NAMED_SAMPLE = re.compile(r"\bsample (\d+)\b")
_MAX_SERVICE_ERRORS = 3


def score_each(
    requests: Sequence[RewardRequest], rm_type: str | None = None, *, options: Options | None = None
) -> list[Score | BaseException]:
    """As :func:`~rewards.scoring.score`, with what was raised in the place of each request that can't be scored.

    A service that fails on single requests is asked again for the others, a few times; one that is down fails on
    every one, after its retries, and the rest of the batch fails with it.
    """
    batch = list(requests)
    try:
        return list(score(batch, rm_type, options=options))
    except RewardServiceError as error:
        return _without_failed(batch, rm_type, options, error)
    except Exception:
        return [_score_alone(request, rm_type, options) for request in batch]


def row_problem(
    rm_type: str | None,
    label: Any,
    metadata: Mapping[str, Any] | None,
    *,
    modality: Literal["text", "image"] | None = None,
) -> str | None:
    """Why rows with this label and metadata could not be scored: no such reward, no label; `None` if they can.

    Args:
        rm_type: The run's reward; the row's `metadata["rm_type"]` goes before it.
        label: Of the row.
        metadata: Of the row.
        modality: What will be scored, if the reward must be made for it.
    """
    own = (metadata or {}).get("rm_type")
    name = own or rm_type
    if name is None:
        return "no reward: give --rm-type, or metadata.rm_type in the row"
    try:
        needs = needs_label(name)
    except UnknownRewardError as error:
        return f"metadata.rm_type: {error}" if own else str(error)
    spec = get_spec(name)[0]
    if modality is not None and spec.modality != modality and not (spec.remote or spec.composite):
        return f"the reward {name} scores {spec.modality}s, not {modality}s"
    if needs and (label is None or label == ""):
        return f"no label, which the reward {name} needs (--label-key)"
    return None


def _without_failed(
    requests: list[RewardRequest], rm_type: str | None, options: Options | None, error: RewardServiceError
) -> list[Score | BaseException]:
    results: list[Score | BaseException | None] = [None] * len(requests)
    left = list(range(len(requests)))
    for _ in range(_MAX_SERVICE_ERRORS):
        named = _NAMED_SAMPLE.search(str(error))
        failed = [i for i in left if named and requests[i].sample_id == int(named.group(1))]
        for i in failed:
            results[i] = error
            left.remove(i)
        if not failed or not left:
            break
        try:
            scores = score([requests[i] for i in left], rm_type, options=options)
        except RewardServiceError as another:
            error = another
            continue
        for i, value in zip(left, scores, strict=True):
            results[i] = value
        left = []
        break
    return [error if result is None else result for result in results]


def _score_alone(request: RewardRequest, rm_type: str | None, options: Options | None) -> Score | BaseException:
    try:
        return score([request], rm_type, options=options)[0]
    except Exception as error:
        return error
