"""`score`: one call for every reward, batched, with the order kept."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from rewards.registry import RewardSpec, get_spec, load, missing_extra
from rewards.request import LabelError, RewardError, RewardRequest, Score, UnknownRewardError
from rewards.text.boxed import last_boxed

Options = Mapping[str, Mapping[str, Any]]

_scorers: dict[tuple[str, str], Callable[[Sequence[RewardRequest]], list[Score]]] = {}
_scorers_lock = threading.RLock()


def score(
    requests: Sequence[RewardRequest], rm_type: str | None = None, *, options: Options | None = None
) -> list[Score]:
    """Score a batch.

    Requests of one reward are scored together, so a batch with mixed types costs no more than its parts.

    Args:
        requests: What to score.
        rm_type: The reward's name, with `boxed_` in front to grade only the last `\\boxed{}` of the response.
            A request's own `metadata["rm_type"]` goes before it.
        options: Keyword arguments by reward, e.g. `{"remote_rm": {"url": "http://host:8000/score"}}`.

    Returns:
        One score a request, in the order of the requests: a float, or a dict for rewards that report several entries.

    Raises:
        UnknownRewardError: No such reward; the message has the nearest name.
        LabelError: A label that is missing or malformed; the message names the sample.
        RewardError: Any other request that could not be scored; a failure is never a score of 0.
    """
    scores: list[Any] = [None] * len(requests)
    groups: dict[str | None, list[int]] = {}
    for index, request in enumerate(requests):
        name = _own_type(request, index) or rm_type if request.metadata else rm_type
        try:
            groups[name].append(index)
        except KeyError:
            groups[name] = [index]
    for name, indices in groups.items():
        if name is None:
            raise RewardError(
                f"{sample_name(requests[indices[0]], indices[0])} has no reward: "
                "pass rm_type (--rm-type) or set metadata.rm_type on the sample."
            )
        _score_group(name, requests, indices, scores, options)
    return scores


def prepare(rm_type: str, *, options: Options | None = None) -> None:
    """Import a reward and build its scorer now, not with the first batch.

    Raises:
        UnknownRewardError: No such reward.
        ValueError: An option that the reward does not take, or one that it needs and lacks.
    """
    spec, _ = get_spec(rm_type)
    chosen = _options_of(spec, options)
    if spec.kind == "scorer":
        _scorer(spec.name, chosen)
    else:
        _check_options(spec, chosen)


def sample_name(request: RewardRequest, index: int) -> str:
    """How messages name a request."""
    return f"sample {index if request.sample_id is None else request.sample_id}"


def _score_group(
    rm_type: str, requests: Sequence[RewardRequest], indices: list[int], scores: list[Any], options: Options | None
) -> None:
    """Score the requests at `indices`, which all have this `rm_type`, into `scores`."""
    spec, boxed = get_spec(rm_type)
    chosen = _options_of(spec, options)
    if spec.needs_label:
        for index in indices:
            _check_label(rm_type, requests[index], index)
    if spec.kind == "scorer":
        batch = [_named_request(requests[index], index, boxed) for index in indices]
        results = _scorer(spec.name, chosen)(batch)
        if len(results) != len(batch):
            raise RewardError(f"the {rm_type} scorer returned {len(results)} scores for {len(batch)} requests.")
        for index, result in zip(indices, results, strict=True):
            scores[index] = result
        return
    if chosen:
        _check_options(spec, chosen)
    grade = partial(load(spec.name), **chosen) if chosen else load(spec.name)
    fields = attrgetter(*spec.inputs) if len(spec.inputs) > 1 else None
    for index in indices:
        request = requests[index]
        if not isinstance(request.response, str) or boxed:
            request = _boxed_request(request) if boxed else _text_request(request)
        try:
            scores[index] = grade(*fields(request)) if fields else grade()
        except ModuleNotFoundError as error:
            raise _explained(spec, error) from error
        except RewardError as error:
            kind = LabelError if isinstance(error, LabelError) else RewardError
            raise kind(f"{sample_name(request, index)}: {error} (rm_type {rm_type})") from error
        except Exception as error:  # no response raises, so this is data that the grader trips over
            raise LabelError(
                f"{sample_name(request, index)}: the {rm_type} reward cannot read label {request.label!r:.100} with "
                f"metadata {request.metadata!r:.200}: {type(error).__name__}: {error}"
            ) from error


def _own_type(request: RewardRequest, index: int) -> str | None:
    """The reward that a request's metadata name, if they name one."""
    metadata = request.metadata
    if not isinstance(metadata, Mapping):
        raise LabelError(f"{sample_name(request, index)} has metadata {metadata!r:.100}, which is no mapping")
    name = metadata.get("rm_type")
    if not name:
        return None
    try:
        get_spec(name)
    except (UnknownRewardError, TypeError) as error:
        raise UnknownRewardError(f"{sample_name(request, index)}: metadata.rm_type {name!r:.100}: {error}") from error
    return name


def _options_of(spec: RewardSpec, options: Options | None) -> Mapping[str, Any]:
    """The options of one reward; a composite one gets those of all as well."""
    chosen = (options or {}).get(spec.name) or {}
    if spec.composite:
        return {**chosen, "options": {**(options or {}), **chosen.get("options", {})}}
    return chosen


def _check_options(spec: RewardSpec, options: Mapping[str, Any]) -> None:
    """Whether the reward takes these options; what a function reads of a request is none.

    Raises:
        ValueError: It does not; the message has the nearest name.
    """
    parameters = inspect.signature(load(spec.name)).parameters.values()
    known = [entry.name for entry in parameters if spec.kind == "scorer" or entry.kind is entry.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown option {name!r} of the {spec.name} reward. {hint}Known: {', '.join(known)}.")


def _check_label(rm_type: str, request: RewardRequest, index: int) -> None:
    label = request.label
    if label is None or label == "" or (isinstance(label, float) and not math.isfinite(label)):
        raise LabelError(
            f"{sample_name(request, index)} has label {label!r}, and the {rm_type} reward needs one: "
            "check --label-key, or choose a reward that grades without a label."
        )


def _named_request(request: RewardRequest, index: int, boxed: bool) -> RewardRequest:
    """The request as a scorer gets it: with the name that its errors use."""
    if boxed:
        request = _boxed_request(request)
    return replace(request, sample_id=index) if request.sample_id is None else request


def _text_request(request: RewardRequest) -> RewardRequest:
    """The request with a response that is a string: `None` is an empty one."""
    response = "" if request.response is None else str(request.response)
    return replace(request, response=response)


def _boxed_request(request: RewardRequest) -> RewardRequest:
    """The request with the content of the last `\\boxed{}` as its response, empty where there is none."""
    response = request.response if isinstance(request.response, str) else ""
    return replace(request, response=last_boxed(response) or "")


def _scorer(name: str, options: Mapping[str, Any]) -> Callable[[Sequence[RewardRequest]], list[Score]]:
    """The scorer object of a name and its options; built once, since building may load a model."""
    key = (name, json.dumps(options, sort_keys=True, default=repr))
    with _scorers_lock:
        if key not in _scorers:
            spec = get_spec(name)[0]
            _check_options(spec, options)
            try:
                scorer = load(name)(**options)
            except ModuleNotFoundError as error:
                raise _explained(spec, error) from error
            _scorers[key] = scorer if spec.remote or spec.composite else _one_at_a_time(scorer)
        return _scorers[key]


def _explained(spec: RewardSpec, error: ModuleNotFoundError) -> ImportError:
    """The error that names the extra, if it is an extra that is missing."""
    return error if spec.extra is None else missing_extra(spec.name, spec.extra, error)


def _one_at_a_time(
    scorer: Callable[[Sequence[RewardRequest]], list[Score]],
) -> Callable[[Sequence[RewardRequest]], list[Score]]:
    """The scorer for callers in several threads: models and OCR engines keep state while they run."""
    lock = threading.Lock()

    def locked(requests: Sequence[RewardRequest]) -> list[Score]:
        with lock:
            return scorer(requests)

    return locked
