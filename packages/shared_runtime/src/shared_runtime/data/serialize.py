"""Samples as plain JSON-able data and back: for checkpoints of the data source and for dumps of rollouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from shared_runtime.sample import BaseSample, Status

S = TypeVar("S", bound=BaseSample)


def sample_to_dict(sample: BaseSample) -> dict[str, Any]:
    """A sample's fields that differ from their defaults.

    Raises:
        TypeError: If a value is not JSON-able; the message names the sample and the field.
    """
    result: dict[str, Any] = {}
    for item in dataclasses.fields(sample):
        value = getattr(sample, item.name)
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if type(value) is type(default) and value == default:
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"sample {sample.index}: field {item.name!r} can't be written as JSON: {error}. "
                "Keep tensors out of samples that wait in the buffer, and plain data in metadata."
            ) from error
        result[item.name] = value
    return result


def sample_from_dict(make_sample: Callable[..., S], fields: dict[str, Any]) -> S:
    """The sample that `sample_to_dict` wrote, built by `make_sample(**fields)`.

    Raises:
        TypeError: If the fields are not those of this kind of sample.
    """
    fields = dict(fields)
    if "status" in fields:
        fields["status"] = Status(fields["status"])
    return make_sample(**fields)
