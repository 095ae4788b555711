"""`weighted_mixture`: a weighted sum of rewards, each of them kept in the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.registry import get_spec
from rewards.request import RewardError, RewardRequest, Score


class WeightedMixtureScorer:
    """{name: score for each component, "weighted": Σ weight · score}. Train on `weighted` (`--reward-key weighted`).

    Weights apply to raw scores, whose scales differ (HPS about 0.3, PickScore about 0.8, OCR 0 to 1).

    Args:
        weights: `"ocr=0.8,pickscore=0.2"`, or a mapping of that kind.
        options: Options of the components by name, as `score` takes them.
    """

    def __init__(
        self, weights: str | Mapping[str, float] = "", options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._weights = parse_weights(weights)
        self._options = options or {}

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One mapping a request.

        Raises:
            RewardError: A component whose score is no number, and whatever the components raise.
        """
        from dataclasses import replace

        from rewards.scoring import score

        plain = [replace(request, metadata=_without_type(request.metadata)) for request in requests]
        columns = {name: score(plain, name, options=self._options) for name in self._weights}
        results: list[Score] = []
        for index, request in enumerate(requests):
            parts: dict[str, float] = {}
            for name, column in columns.items():
                value = column[index]
                if isinstance(value, dict):
                    raise RewardError(
                        f"sample {request.sample_id}: {name} answers several entries {sorted(value)}, "
                        "and a mixture adds numbers"
                    )
                parts[name] = value
            results.append({**parts, "weighted": sum(self._weights[name] * parts[name] for name in parts)})
        return results


def parse_weights(weights: str | Mapping[str, float]) -> dict[str, float]:
    """The weights of `"name=weight,name=weight"`.

    Raises:
        ValueError: No weights, a name twice, or a weight that is no finite number.
        UnknownRewardError: A name that is not registered.
    """
    if isinstance(weights, str):
        entries = [entry.partition("=") for entry in weights.split(",") if entry.strip()]
        if not entries or any(not separator for _, separator, _ in entries):
            raise ValueError(f"mixture weights {weights!r} are to read like 'ocr=0.8,pickscore=0.2'")
        pairs = [(name.strip(), weight.strip()) for name, _, weight in entries]
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"mixture weights {weights!r} name a reward twice")
    else:
        pairs = [(name, str(weight)) for name, weight in weights.items()]
    parsed = {}
    for name, weight in pairs:
        if get_spec(name)[0].name == "weighted_mixture":
            raise ValueError("a mixture is no component of a mixture")
        try:
            parsed[name] = float(weight)
        except ValueError:
            parsed[name] = math.nan
        if not math.isfinite(parsed[name]):
            raise ValueError(f"the mixture weight of {name} is {weight!r}, and not a finite number")
    if not parsed:
        raise ValueError("a mixture needs weights, e.g. 'ocr=0.8,pickscore=0.2'")
    return parsed


def _without_type(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The metadata without `rm_type`, which chose the mixture and must not choose its components."""
    if not metadata or "rm_type" not in metadata:
        return metadata
    return {key: value for key, value in metadata.items() if key != "rm_type"}
