"""Every reward by name: where it lives, what it reads and what it needs, without importing any of them.

To add a reward, write one file and one entry of `REWARDS`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rewards.request import MissingExtraError, UnknownRewardError

BOXED_PREFIX = "boxed_"


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One registered reward.

    Attributes:
        name: What `rm_type` says.
        target: `module:attribute`. A function for `kind="function"`, a class for `kind="scorer"`.
        kind: `function`: called once a request with the request's `inputs` as positional arguments and the options as
            keywords. `scorer`: constructed once with the options, then called with a list of requests.
        inputs: Fields of `RewardRequest` that a function takes, in order.
        needs_label: A request without a label is an error.
        modality: What is scored.
        extra: The extra of this package that its dependencies are in; `None` for the base install.
        remote: The work is done elsewhere: a pool of processes would not make it faster.
        composite: It scores by other rewards, and takes all their options as its option `options`.
    """

    name: str
    target: str
    kind: Literal["function", "scorer"] = "function"
    inputs: tuple[str, ...] = ("response", "label")
    needs_label: bool = True
    modality: Literal["text", "image"] = "text"
    extra: str | None = None
    remote: bool = False
    composite: bool = False


def _text(name: str, inputs: tuple[str, ...] = ("response", "label"), **fields: Any) -> RewardSpec:
    return RewardSpec(name, f"rewards.text.{name}:grade", inputs=inputs, **fields)


def _image(name: str, target: str, **fields: Any) -> RewardSpec:
    return RewardSpec(name, f"rewards.image.{target}", "scorer", needs_label=False, modality="image", **fields)


REWARDS: dict[str, RewardSpec] = {
    spec.name: spec
    for spec in (
        _text("math"),
        _text("dapo"),
        _text("deepscaler"),
        _text("gemma_math"),
        _text("f1"),
        _text("gpqa", ("response", "label", "metadata")),
        _text("ifbench", ("response", "metadata", "prompt"), needs_label=False, extra="ifbench"),
        _text("code"),
        _text("format", ("response", "metadata"), needs_label=False),
        _text("random", (), needs_label=False),
        _text("deterministic_random", ("response", "tokens", "prompt"), needs_label=False),
        RewardSpec("remote_rm", "rewards.text.remote_rm:RemoteReward", "scorer", needs_label=False, remote=True),
        _image("ocr", "ocr:OcrScorer", extra="ocr"),
        _image("pickscore", "pickscore:PickScoreScorer", extra="clip"),
        _image("hps", "hps:HpsScorer", extra="clip"),
        _image("clip", "clip:ClipScorer", extra="clip"),
        _image("aesthetic", "aesthetic:AestheticScorer", extra="clip"),
        _image("jpeg_compressibility", "jpeg:JpegCompressibilityScorer"),
        _image("jpeg_incompressibility", "jpeg:JpegIncompressibilityScorer"),
        _image("shapes", "shapes:ShapesScorer"),
        _image("openai_api", "openai_api:OpenAIApiScorer", remote=True),
        _image("custom_api", "api:CustomApiScorer", remote=True),
        _image("weighted_mixture", "weighted_mixture:WeightedMixtureScorer", composite=True),
    )
}


def known_rm_types() -> tuple[str, ...]:
    """Every name `rm_type` may take, without the `boxed_` variants of the text graders."""
    return tuple(REWARDS)


def split_boxed(rm_type: str) -> tuple[bool, str]:
    """`"boxed_math"` is `(True, "math")`; any other name is `(False, name)`."""
    if rm_type.startswith(BOXED_PREFIX):
        return True, rm_type[len(BOXED_PREFIX) :]
    return False, rm_type


@lru_cache(maxsize=256)
def get_spec(rm_type: str) -> tuple[RewardSpec, bool]:
    """The registered reward of a name, and whether the name has the `boxed_` prefix.

    Raises:
        UnknownRewardError: No such reward; the message has the nearest name.
    """
    boxed, name = split_boxed(rm_type) if isinstance(rm_type, str) else (False, rm_type)
    spec = REWARDS.get(name) if isinstance(name, str) else None
    if spec is None:
        near = difflib.get_close_matches(str(name), REWARDS, n=1, cutoff=0.4)
        hint = f"Did you mean {BOXED_PREFIX * boxed + near[0]!r}? " if near else ""
        raise UnknownRewardError(f"unknown rm_type {rm_type!r}. {hint}Known: {', '.join(REWARDS)}.")
    if boxed and spec.modality != "text":
        raise UnknownRewardError(
            f"unknown rm_type {rm_type!r}: the boxed_ prefix reads text answers, and {name} scores images. "
            f"Did you mean {name!r}?"
        )
    return spec, boxed


def needs_label(rm_type: str) -> bool:
    """Whether a request without a label is an error for this reward.

    Raises:
        UnknownRewardError: No such reward.
    """
    return get_spec(rm_type)[0].needs_label


@lru_cache(maxsize=64)
def load(name: str) -> Callable[..., Any]:
    """Import the function or class behind a registered name (without the `boxed_` prefix).

    The modules of rewards import their optional dependencies when these are first used, so this works without them.
    """
    module, _, attribute = get_spec(name)[0].target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def missing_extra(name: str, extra: str, error: ImportError) -> MissingExtraError:
    """The error of a reward whose optional dependency is absent."""
    return MissingExtraError(
        f"the {name} reward needs {error.name or error}, which is not installed: "
        f"install the extra with `uv pip install 'tandem-rewards[{extra}]'`."
    )
