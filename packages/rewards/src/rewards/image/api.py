"""`custom_api`: any HTTP service as a reward, by an actor class of three methods."""

from __future__ import annotations

import base64
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.client import checked_score, map_concurrently
from rewards.request import RewardRequest, RewardServiceError, Score

_DEFAULT_ACTOR = "rewards.image.openai_api.OpenAIImageRewardActor"
_DEFAULT_CONCURRENCY = 8
_TOP_LEVEL = frozenset({"actor_class", "actor_kwargs", "max_concurrency"})


class ApiRewardActor(ABC):
    """One request to a service for each sample. Methods run in threads, several at once.

    A subclass takes the config's `actor_kwargs` as keywords. To read a path that the config names relative to itself,
    it takes the keyword `config_dir` (`None` for an inline config).
    """

    @abstractmethod
    def build_request(self, request: RewardRequest) -> Any:
        """What to send for a sample."""

    @abstractmethod
    def send_request(self, payload: Any, name: str) -> Any:
        """Send it and return the answer; `name` is how errors name the sample (`sample 17`)."""

    @abstractmethod
    def parse_response(self, response: Any) -> Score:
        """The score in an answer. Raise `ValueError` for an answer that has none."""


class CustomApiScorer:
    """Scores each sample by one request of an actor, at most `max_concurrency` of them at once.

    Args:
        config: A YAML file, or `base64:` and the base64 of YAML, with `actor_class` (a dotted path), `actor_kwargs` and
            `max_concurrency` (default 8). A flat mapping is the `actor_kwargs` of the default actor.
    """

    flag = "--custom-api-rm-config"

    def __init__(self, config: str | None = None) -> None:
        if not config:
            raise ValueError(f"an API reward needs its config: a YAML file, or base64: and its payload ({self.flag})")
        settings, directory = load_config(config, self.flag)
        self._concurrency = int(settings["max_concurrency"])
        self.actor = _build_actor(settings["actor_class"], settings["actor_kwargs"], directory, self.flag)
        self._check_actor()

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order.

        Raises:
            RewardServiceError: The service failed, or answered no score in range; the message names the sample.
        """
        return map_concurrently(self._score, [(request,) for request in requests], self._concurrency)

    def _check_actor(self) -> None:
        """For subclasses that take one kind of actor."""

    def _score(self, request: RewardRequest) -> Score:
        name = f"sample {request.sample_id}"
        response = self.actor.send_request(self.actor.build_request(request), name)
        try:
            score = self.actor.parse_response(response)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RewardServiceError(f"{name}: {type(self.actor).__name__} could not read a score: {error}") from error
        return checked_score(score, name, type(self.actor).__name__)


def load_config(config: str, flag: str) -> tuple[dict[str, Any], Path | None]:
    """The settings of an API config, and the directory of its file (`None` if it came inline).

    Raises:
        ValueError: It cannot be read, or has keys that are unknown.
    """
    import yaml

    try:
        if config.startswith("base64:"):
            directory, text = None, base64.b64decode(config.removeprefix("base64:"), validate=True).decode()
        else:
            directory, text = Path(config).resolve().parent, Path(config).read_text()
        data = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{flag} {config[:100]!r} cannot be read: {error}") from error
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{flag} {config[:100]!r} holds no mapping")
    if not _TOP_LEVEL & data.keys():
        data = {"actor_kwargs": data}
    unknown = data.keys() - _TOP_LEVEL
    if unknown:
        raise ValueError(f"{flag} has the unknown key {sorted(unknown)[0]!r}; known: {', '.join(sorted(_TOP_LEVEL))}")
    settings = {"actor_class": _DEFAULT_ACTOR, "actor_kwargs": {}, "max_concurrency": _DEFAULT_CONCURRENCY, **data}
    if not isinstance(settings["max_concurrency"], int) or settings["max_concurrency"] < 1:
        raise ValueError(f"{flag}: max_concurrency is a positive integer, not {settings['max_concurrency']!r}")
    return settings, directory


def _build_actor(path: str, kwargs: Mapping[str, Any], directory: Path | None, flag: str) -> ApiRewardActor:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag}: actor_class {path!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, ApiRewardActor)):
        raise ValueError(f"{flag}: actor_class {path!r} is no subclass of rewards.image.api.ApiRewardActor")
    parameters = inspect.signature(kind).parameters
    extra = {"config_dir": directory} if "config_dir" in parameters else {}
    try:
        inspect.signature(kind).bind(**kwargs, **extra)
    except TypeError as error:
        raise ValueError(f"{flag}: actor_kwargs of {name}: {error}; it takes {', '.join(parameters)}") from error
    return kind(**kwargs, **extra)
