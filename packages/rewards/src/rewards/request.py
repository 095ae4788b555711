"""The request every grader and scorer takes, and the errors they raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Score: TypeAlias = float | dict[str, Any]
"""What one request is worth: a number, or a dict of named entries of which one is trained on."""


@dataclass(slots=True)
class RewardRequest:
    """One response, image or video to be scored.

    Attributes:
        response: What the model wrote. Image scorers ignore it.
        label: The reference answer: usually a string, but an int (0 included), a float or, for graders that say
            so, a list. A grader that needs a label raises `LabelError` where it is `None`.
        prompt: The prompt as text. Text-image scorers read the generation prompt here.
        metadata: The row's own data. `metadata["rm_type"]` overrides the run's `rm_type` for this request.
        image: An image (`PIL.Image`, or an array, CHW or HWC, float in [0, 1] or uint8), or a video: a list of images
            or a four-dimensional array whose first axis is time.
        sample_id: How errors name this request; its index in the batch where absent.
        tokens: Token ids of prompt and response; only `deterministic_random` reads them.
    """

    response: str = ""
    label: Any = None
    prompt: str | None = None
    metadata: Mapping[str, Any] | None = None
    image: Any = None
    sample_id: int | str | None = None
    tokens: Sequence[int] | None = None


class RewardError(Exception):
    """A request that could not be scored. Its message names the sample."""


class UnknownRewardError(RewardError, ValueError):
    """A reward name that is not registered. Its message has the nearest name that is."""


class LabelError(RewardError, ValueError):
    """A label (or prompt, or metadata) that is missing or that its grader cannot read."""


class RewardServiceError(RewardError):
    """A reward service that failed after every retry, or that answered with something else than a score."""


class MissingExtraError(RewardError, ImportError):
    """A reward whose optional dependencies are not installed. Its message names the extra."""
