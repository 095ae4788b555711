"""`format`: does the response have the form that was asked for?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rewards.request import LabelError

_TIME_LIMIT_S = 0.08
_MAX_CHARACTERS = 100_000
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def grade(
    response: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    pattern: str | None = None,
    json_schema: Mapping[str, Any] | None = None,
) -> float:
    """1.0 if the response has the form, else 0.0.

    The form is a regular expression that the whole response has to match (`.` matches line breaks), or a JSON schema
    that the answer has to satisfy: the last ```json block, else the last `\\boxed{}`, else the whole response. Given
    both, both count. A sample's own form goes before the run's.

    Args:
        response: What the model wrote. Over 100,000 characters it scores 0, as does a match that takes over 80 ms.
        metadata: `pattern` and `json_schema` of this sample.
        pattern: The run's regular expression.
        json_schema: The run's JSON schema.

    Raises:
        LabelError: No form is given, or the one given is invalid.
    """
    metadata = metadata or {}
    pattern = metadata.get("pattern", pattern)
    json_schema = metadata.get("json_schema", json_schema)
    if pattern is None and json_schema is None:
        raise LabelError("the format reward needs a form: metadata.pattern, metadata.json_schema, or its options")
    if len(response) > _MAX_CHARACTERS:
        return 0.0
    if pattern is not None and not _matches(pattern, response):
        return 0.0
    return float(json_schema is None or _satisfies(json.dumps(json_schema, sort_keys=True), response))


def _matches(pattern: str, response: str) -> bool:
    import regex

    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise LabelError(f"pattern {pattern!r:.200} is no regular expression: {error}") from error
    try:
        return compiled.fullmatch(response, timeout=_TIME_LIMIT_S) is not None
    except TimeoutError:
        return False


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    import jsonschema

    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as error:
        raise LabelError(f"json_schema is invalid: {error.message}") from error
    return kind(loaded)


def _satisfies(schema: str, response: str) -> bool:
    from rewards.text.boxed import has_box, last_boxed

    validator = _validator(schema)
    fences = _FENCE.findall(response)
    answer = fences[-1] if fences else (last_boxed(response) if has_box(response) else None) or response
    try:
        return validator.is_valid(json.loads(answer))
    except (ValueError, RecursionError):
        return False
