"""JPEG size, API judges, mixtures."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rewards import LabelError, RewardRequest, RewardServiceError, UnknownRewardError, score
from rewards.image.api import ApiRewardActor, load_config
from rewards.image.openai_api import DEFAULT_RUBRIC, find_score
from rewards.image.weighted_mixture import parse_weights
from tests.rewards.image_helpers import random_image

# jpeg ---------------------------------------------------------------------------------------------------------------


def test_jpeg_rewards_are_the_size_of_the_file() -> None:
    image = random_image(0, 48)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "jpeg", quality=95)
    kilobytes = len(buffer.getvalue()) / 1000
    flat = np.zeros((48, 48, 3), np.uint8)
    batch = [RewardRequest(image=image), RewardRequest(image=image.astype(np.float32) / 255), RewardRequest(image=flat)]
    scores = score(batch, "jpeg_compressibility")
    assert scores[0] == scores[1] == pytest.approx(-kilobytes / 500, abs=1e-12)
    assert scores[2] > scores[0]  # type: ignore[operator]
    assert score(batch, "jpeg_incompressibility") == [-value for value in scores]  # type: ignore[operator]
    video = score([RewardRequest(image=[image, flat])], "jpeg_compressibility")[0]
    assert video == pytest.approx((scores[0] + scores[2]) / 2)  # type: ignore[operator]


# API judges ---------------------------------------------------------------------------------------------------------


class Judge(BaseHTTPRequestHandler):
    """A Chat Completions endpoint that answers from a list and keeps what it was sent."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, self.headers.get("Authorization"), body))
            server.now += 1
            server.most = max(server.most, server.now)
            status, content = server.answers.pop(0) if server.answers else (200, '{"score": 3}')
        time.sleep(server.delay)
        answer = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        with server.lock:
            server.now -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def judge() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.lock, server.seen, server.answers, server.delay, server.now, server.most = threading.Lock(), [], [], 0, 0, 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def config(judge: Any, **extra: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{judge.server_address[1]}/v1"
    return {"model": "judge-1", "api_key_env": "JUDGE_KEY", "base_url": url, "retries": 1, **extra}


def inline(settings: dict[str, Any]) -> str:
    return "base64:" + base64.b64encode(json.dumps(settings).encode()).decode()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "the-key")


def ask(settings: dict[str, Any], requests: list[RewardRequest], name: str = "openai_api") -> Any:
    return score(requests, name, options={name: {"config": inline(settings)}})


def test_openai_api_sends_rubric_prompt_and_image_and_reads_the_score(judge: Any) -> None:
    image = random_image(0)
    judge.answers = [(200, 'I see. ```json\n{"reason": "good", "score": 2.5}\n```')]
    assert ask(config(judge), [RewardRequest(prompt="a cat", image=image)]) == [2.5]
    path, authorization, body = judge.seen[0]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer the-key", "judge-1")
    system, user = body["messages"]
    assert system == {"role": "system", "content": DEFAULT_RUBRIC}
    assert user["content"][0] == {"type": "text", "text": "a cat"}
    data = user["content"][1]["image_url"]["url"].removeprefix("data:image/png;base64,")
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), image)


def test_openai_api_errors_name_the_sample(judge: Any) -> None:
    requests = [RewardRequest(prompt="a", image=random_image(0), sample_id="s7")]
    judge.answers = [(200, '{"score": 9}')]
    with pytest.raises(RewardServiceError, match=r"sample s7: .*score 9.0 is outside \[0.0, 4.0\]"):
        ask(config(judge), requests)
    judge.answers = [(200, "no idea")]
    with pytest.raises(RewardServiceError, match=r"sample s7: .*no JSON object"):
        ask(config(judge), requests)
    judge.answers = [(500, ""), (503, "")]
    with pytest.raises(RewardServiceError, match=r"sample s7: .*failed 2 times"):
        ask(config(judge), requests)
    judge.answers = [(500, ""), (200, '{"score": 0}')]
    assert ask(config(judge), requests) == [0.0]
    judge.answers = [(401, "")]
    with pytest.raises(RewardServiceError, match=r"sample s7: .*HTTP 401"):
        ask(config(judge), requests)
    with pytest.raises(LabelError, match="sample s7 is a video"):
        ask(config(judge), [RewardRequest(prompt="a", image=[random_image(0)] * 2, sample_id="s7")])


def test_openai_api_keeps_order_and_its_limit_of_concurrency(judge: Any) -> None:
    judge.delay = 0.05
    judge.answers = [(200, json.dumps({"score": 1}))] * 12
    settings = {"actor_kwargs": config(judge), "max_concurrency": 3}
    assert ask(settings, [RewardRequest(prompt=str(i), image=random_image(i, 8)) for i in range(12)]) == [1.0] * 12
    assert judge.most == 3


def test_config_files_rubrics_and_mistakes(judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rubric.txt").write_text("judge strictly")
    file = tmp_path / "judge.yaml"
    file.write_text(json.dumps(config(judge, prompt_path="rubric.txt", score_max=10)))
    judge.answers = [(200, '{"score": 8}')]
    options = {"openai_api": {"config": str(file)}}
    assert score([RewardRequest(prompt="a", image=random_image(0))], "openai_api", options=options) == [8.0]
    assert judge.seen[0][2]["messages"][0]["content"] == "judge strictly"
    request = [RewardRequest(prompt="a", image=random_image(0))]
    with pytest.raises(ValueError, match="inline config has none"):
        ask(config(judge, prompt_path="rubric.txt"), request)
    with pytest.raises(ValueError, match="not from both"):
        ask(config(judge, prompt_path="rubric.txt", prompt="x"), request)
    with pytest.raises(ValueError, match="unexpected keyword argument 'modell'"):
        ask(config(judge, modell="x"), request)
    with pytest.raises(ValueError, match="--custom-api-rm-config has the unknown key 'actor_klass'"):
        load_config(inline({"actor_klass": "x", "max_concurrency": 2}), "--custom-api-rm-config")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config("base64:!!", "--openai-api-rm-config")
    with pytest.raises(ValueError, match="--openai-api-rm-config"):
        score(request, "openai_api")
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="environment variable JUDGE_KEY"):
        ask(config(judge, model="other"), request)


class BrightnessActor(ApiRewardActor):
    """An actor as a user writes one."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    def build_request(self, request: RewardRequest) -> Any:
        return {"brightness": float(np.mean(request.image)), "prompt": request.prompt}

    def send_request(self, payload: Any, name: str) -> Any:
        return {"value": payload["brightness"] + self.offset}

    def parse_response(self, response: Any) -> float:
        return response["value"]


def test_custom_api_takes_any_actor(judge: Any) -> None:
    path = f"{BrightnessActor.__module__}.BrightnessActor"
    settings = {"actor_class": path, "actor_kwargs": {"offset": 1.0}}
    batch = [RewardRequest(image=np.full((2, 2, 3), value, np.uint8)) for value in (0, 10)]
    assert ask(settings, batch, "custom_api") == [1.0, 11.0]
    assert ask(config(judge), [RewardRequest(prompt="a", image=random_image(0))], "custom_api") == [3.0]
    with pytest.raises(ValueError, match="use --rm-type custom_api"):
        ask(settings, batch)
    with pytest.raises(ValueError, match="is no subclass"):
        ask({"actor_class": "json.JSONDecoder"}, batch, "custom_api")


@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"score": 1}', 1.0), ('{"a": {"score": 9}, "score": "2"}', 2.0), ('{"score": 1} then {"score": 0}', 0.0)],
)
def test_score_parsing(content: str, expected: float) -> None:
    assert find_score(content) == expected


@pytest.mark.parametrize("content", ["", "3", '{"score": null}', '{"score": true}', '{"score": NaN}', "{" * 5000])
def test_answers_without_a_score(content: str) -> None:
    with pytest.raises(ValueError, match=r"score|could not convert"):
        find_score(content)


# weighted_mixture ---------------------------------------------------------------------------------------------------


def test_a_mixture_keeps_its_components() -> None:
    batch = [RewardRequest(image=random_image(i), metadata={"rm_type": "weighted_mixture"}) for i in range(2)]
    options = {"weighted_mixture": {"weights": "jpeg_compressibility=0.8,jpeg_incompressibility=0.2"}}
    results = score(batch, options=options)
    parts = score([RewardRequest(image=random_image(i)) for i in range(2)], "jpeg_compressibility")
    for result, part in zip(results, parts, strict=True):
        assert isinstance(result, dict)
        assert isinstance(part, float)
        assert set(result) == {"jpeg_compressibility", "jpeg_incompressibility", "weighted"}
        assert result["jpeg_compressibility"] == part
        assert result["weighted"] == pytest.approx(0.8 * part - 0.2 * part)


def test_mixture_components_have_their_options() -> None:
    frames = [random_image(0), np.zeros((32, 32, 3), np.uint8), random_image(1)]
    options = {
        "weighted_mixture": {"weights": {"jpeg_compressibility": 1.0}},
        "jpeg_compressibility": {"num_frames": 2},
    }
    mixed = score([RewardRequest(image=frames)], "weighted_mixture", options=options)[0]
    alone = score([RewardRequest(image=[frames[0], frames[2]])], "jpeg_compressibility")[0]
    assert isinstance(mixed, dict)
    assert mixed["weighted"] == alone


def test_mistakes_in_weights() -> None:
    assert parse_weights(" ocr = 0.8, pickscore=0.2 ") == {"ocr": 0.8, "pickscore": 0.2}
    with pytest.raises(UnknownRewardError, match="'pickscore'"):
        parse_weights("ocr=0.8,pickscor=0.2")
    for weights in ("", "ocr", "ocr=x", "ocr=nan", "ocr=1,ocr=2", "weighted_mixture=1"):
        with pytest.raises(ValueError, match=r"mixture|weight"):
            parse_weights(weights)
