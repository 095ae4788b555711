"""`openai_api`: a vision-language model behind an OpenAI-compatible endpoint as the judge of an image."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rewards.client import RewardClient
from rewards.image.api import ApiRewardActor, CustomApiScorer
from rewards.image.pixels import request_image, request_prompt
from rewards.request import RewardRequest
from rewards.wire import encode_png

DEFAULT_RUBRIC = """You judge how well an image fits the text it was generated from. Give one score from 0 to 4:
0: it has nothing to do with the text, or is broken beyond recognition;
1: a little of the text is there, most is missing or wrong;
2: about half of what the text asks for is there, or much of it with clear faults;
3: nearly all of it is there, with small mistakes;
4: everything the text asks for is there, and the image is clean and plausible.
Answer with JSON only: {"score": <number>}"""


class OpenAIImageRewardActor(ApiRewardActor):
    """Sends prompt and image to a Chat Completions endpoint and reads `score` from the JSON of the answer.

    Args:
        model: The model's name at the endpoint.
        api_key_env: The environment variable that holds the key.
        base_url: The endpoint, up to and including `/v1`.
        prompt: The rubric, sent as the system message; by default one from 0 to 4.
        prompt_path: A file with the rubric, relative to the config file; not for an inline config.
        score_min: Scores below are errors.
        score_max: Scores above are errors.
        timeout_s: Seconds a try may take.
        retries: Tries after the first, for connection errors, 429 and 5xx.
        config_dir: The directory of the config file.
    """

    def __init__(
        self,
        model: str,
        api_key_env: str,
        base_url: str = "https://api.openai.com/v1",
        prompt: str | None = None,
        prompt_path: str | None = None,
        score_min: float = 0.0,
        score_max: float = 4.0,
        timeout_s: float = 60.0,
        retries: int = 5,
        config_dir: Path | None = None,
    ) -> None:
        if prompt is not None and prompt_path is not None:
            raise ValueError("the rubric comes from prompt or from prompt_path, not from both")
        if prompt_path is not None:
            if config_dir is None:
                raise ValueError("prompt_path is relative to a config file, and an inline config has none: use prompt")
            prompt = (config_dir / prompt_path).read_text()
        key = os.environ.get(api_key_env)
        if not key:
            raise ValueError(f"the environment variable {api_key_env} (api_key_env) holds no key")
        if not score_min < score_max:
            raise ValueError(f"score_min {score_min} must be below score_max {score_max}")
        self._model, self._rubric = model, prompt or DEFAULT_RUBRIC
        self._range = (score_min, score_max)
        self._client = RewardClient(
            f"{base_url.rstrip('/')}/chat/completions",
            timeout_s=timeout_s,
            retries=retries,
            headers={"Authorization": f"Bearer {key}"},
        )

    def build_request(self, request: RewardRequest) -> dict[str, Any]:
        """The rubric, then the prompt and the image as a PNG data URL."""
        image = f"data:image/png;base64,{encode_png(request_image(request, 'openai_api'))}"
        content = [
            {"type": "text", "text": request_prompt(request, "openai_api")},
            {"type": "image_url", "image_url": {"url": image}},
        ]
        messages = [{"role": "system", "content": self._rubric}, {"role": "user", "content": content}]
        return {"model": self._model, "messages": messages, "response_format": {"type": "json_object"}}

    def send_request(self, payload: Any, name: str) -> Any:
        """The endpoint's answer."""
        return self._client.post(payload, name)

    def parse_response(self, response: Any) -> float:
        """The score in the message's JSON.

        Raises:
            ValueError: No JSON with a number `score`, or one out of range.
        """
        score = find_score(response["choices"][0]["message"]["content"])
        low, high = self._range
        if not low <= score <= high:
            raise ValueError(f"score {score} is outside [{low}, {high}] (score_min, score_max)")
        return score


class OpenAIApiScorer(CustomApiScorer):
    """`CustomApiScorer` for `OpenAIImageRewardActor` and its subclasses.

    Args:
        config: As for `CustomApiScorer` (`--openai-api-rm-config`).
    """

    flag = "--openai-api-rm-config"

    def _check_actor(self) -> None:
        if not isinstance(self.actor, OpenAIImageRewardActor):
            raise ValueError(
                f"{self.flag}: {type(self.actor).__name__} is no OpenAIImageRewardActor: use --rm-type custom_api"
            )


def find_score(content: str) -> float:
    """`score` of the last JSON object in a text that has one: the whole text, a fenced block, or within prose.

    Raises:
        ValueError: There is none, or it is no finite number.
    """
    decoder = json.JSONDecoder()
    found: Any = None
    position = content.find("{")
    while position >= 0:
        try:
            data, position_after = decoder.raw_decode(content, position)
        except (ValueError, RecursionError):
            position_after = position + 1
        else:
            if "score" in data:
                found = data["score"]
        position = content.find("{", position_after)
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        raise ValueError(f"no JSON object with a number 'score' in {content[:300]!r}")
    score = float(found)
    if not math.isfinite(score):
        raise ValueError(f"score {found!r} is not finite")
    return score
