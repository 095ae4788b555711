"""`rewards serve` and its client over a real socket; the command line; offline scoring."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rewards import RewardError, RewardRequest, RewardServiceError, UnknownRewardError, score
from rewards.cli import main, read_options
from rewards.client import RewardClient, checked_score
from rewards.offline import score_file
from tests.rewards.image_helpers import random_image

pytest.importorskip("fastapi", reason="the extra tandem-rewards[serve] is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """`rewards serve` in a process of its own, until it answers."""
    port = free_port()
    command = [sys.executable, "-m", "rewards.cli", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the service ended"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


@pytest.fixture(scope="module")
def math_service() -> Iterator[str]:
    with serving("--rm-type", "math", "--max-body-mb", "1") as url:
        yield url


def remote(url: str, **options: Any) -> dict[str, Any]:
    return {"remote_rm": {"url": f"{url}/score", "backoff_s": 0.01, **options}}


def test_remote_rm_scores_as_the_grader_does(math_service: str) -> None:
    requests = [RewardRequest(str(i % 7), "5", metadata={"a": 1}) for i in range(100)]
    assert score(requests, "remote_rm", options=remote(math_service)) == score(requests, "math")
    mixed = [RewardRequest("5", "5", metadata={"rm_type": "remote_rm"}), RewardRequest("cat", "cat")]
    assert score(mixed, "f1", options=remote(math_service)) == [1.0, 1.0]


def test_a_batch_is_one_request(math_service: str) -> None:
    body = {"requests": [{"response": "5", "label": 5}, {"response": "6", "label": 5}]}
    assert httpx.post(f"{math_service}/score_batch", json=body).json() == {"scores": [1.0, 0.0]}
    assert (
        httpx.post(f"{math_service}/score", json={"response": "5", "label": 5, "prompt": [{"role": "user"}]}).json()
        == 1
    )


def test_bad_requests_are_refused_and_named(math_service: str) -> None:
    with pytest.raises(RewardServiceError, match=r"sample 7: .*refused.*422.*sample 7 has label None"):
        score([RewardRequest("5", sample_id=7)], "remote_rm", options=remote(math_service))
    answer = httpx.post(f"{math_service}/score", json={"response": "5", "label": "5", "metadata": {"rm_type": "code"}})
    assert answer.status_code == 422
    assert "asks for rm_type 'code'" in answer.text
    assert httpx.post(f"{math_service}/score", json={"respons": "5"}).status_code == 422
    large = json.dumps({"response": "5", "label": "5", "prompt": "x" * 1_100_000})
    assert httpx.post(f"{math_service}/score", content=large).status_code == 413
    chunks = (large[i : i + 50_000].encode() for i in range(0, len(large), 50_000))
    assert httpx.post(f"{math_service}/score", content=chunks).status_code == 413  # says no length
    assert httpx.post(f"{math_service}/score", json={"response": "5", "label": "5"}).json() == 1.0


def test_the_schema_is_published(math_service: str) -> None:
    schema = httpx.get(f"{math_service}/openapi.json").json()
    assert {"/score", "/score_batch", "/health"} <= set(schema["paths"])
    assert set(schema["components"]["schemas"]["ScoreRequest"]["properties"]) >= {"response", "label", "image"}
    status = httpx.get(f"{math_service}/health").json()
    assert status["rm_type"] == "math"
    assert (status["running"], status["waiting"]) == (0, 0)


def test_images_travel_unchanged() -> None:
    with serving("--rm-type", "jpeg_compressibility") as url:
        batch = [RewardRequest(image=random_image(i)) for i in range(3)]
        batch.append(RewardRequest(image=[random_image(0), random_image(1)]))
        assert score(batch, "remote_rm", options=remote(url)) == score(batch, "jpeg_compressibility")
        answer = httpx.post(f"{url}/score", json={"image": "bm90IGFuIGltYWdl", "sample_id": "x1"})
        assert answer.status_code == 422
        assert "sample x1: image is no base64 of an image file" in answer.text


class Flaky:
    """A service on a bare socket: refuses, then answers what it is told."""

    def __init__(self, answers: list[bytes], delay_s: float = 0.0) -> None:
        self.answers, self.delay_s, self.requests = answers, delay_s, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                answer = self.answers[min(self.requests, len(self.answers) - 1)]
                self.requests += 1
                time.sleep(self.delay_s)
                with contextlib.suppress(OSError):
                    connection.sendall(answer)


def reply(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def test_failures_are_tried_again_and_then_name_the_sample() -> None:
    request = [RewardRequest("x", sample_id=13)]
    flaky = Flaky([reply("busy", "503 Service Unavailable"), b"", reply("0.0")])
    assert score(request, "remote_rm", options=remote(flaky.url)) == [0.0]
    assert flaky.requests == 3
    broken = Flaky([reply("broken", "500 Internal Server Error")])
    with pytest.raises(RewardServiceError, match=r"sample 13: .*failed 3 times.*HTTP 500: broken"):
        score(request, "remote_rm", options=remote(broken.url, retries=2))
    assert broken.requests == 3
    with pytest.raises(RewardServiceError, match=r"sample 13: .*failed 2 times.*ConnectError"):
        score(request, "remote_rm", options=remote(f"http://127.0.0.1:{free_port()}", retries=1))
    slow = Flaky([reply("1")], delay_s=1.0)
    with pytest.raises(RewardServiceError, match=r"sample 13: .*ReadTimeout"):
        score(request, "remote_rm", options=remote(slow.url, retries=0, timeout_s=0.2))
    refused = Flaky([reply("no", "404 Not Found")])
    with pytest.raises(RewardServiceError, match=r"sample 13: .*refused.*404"):
        score(request, "remote_rm", options=remote(refused.url))
    assert refused.requests == 1


@pytest.mark.parametrize("body", ["null", "true", "NaN", '"0.5"', "[]", "{}", '{"score": null}', "not json"])
def test_an_answer_that_is_no_score_is_an_error(body: str) -> None:
    service = Flaky([reply(body)])
    with pytest.raises(RewardServiceError, match="sample 0"):
        score([RewardRequest("x")], "remote_rm", options=remote(service.url))


def test_answers_with_several_entries_are_kept() -> None:
    service = Flaky([reply('{"score": 0.0, "acc": false, "pred": "x"}')])
    expected = [{"score": 0.0, "acc": False, "pred": "x"}]
    assert score([RewardRequest("x")], "remote_rm", options=remote(service.url)) == expected
    assert checked_score(0, "sample", "here") == 0.0


def test_a_teacher_takes_the_same_client() -> None:
    service = Flaky([reply('{"meta_info": {"input_token_logprobs": [[-0.5, 7, null]]}}')])
    answer = RewardClient(service.url).post({"input_ids": [7]}, "sample 0")
    assert answer["meta_info"]["input_token_logprobs"] == [[-0.5, 7, None]]


def test_a_url_is_checked_at_the_door() -> None:
    with pytest.raises(ValueError, match="--rm-url"):
        score([RewardRequest("x")], "remote_rm")
    with pytest.raises(ValueError, match="must begin with http"):
        RewardClient("host:8000")


def test_a_full_queue_is_refused() -> None:
    from fastapi.testclient import TestClient

    from rewards.server import create_app

    client = TestClient(create_app("code", max_concurrency=1, max_waiting=1))
    body = {"response": "import time\ntime.sleep(0.7)", "label": "pass"}
    with client, ThreadPoolExecutor(6) as executor:
        statuses = list(executor.map(lambda _: client.post("/score", json=body).status_code, range(6)))
    assert set(statuses) == {200, 503}
    assert statuses.count(200) == 2


# offline scoring ----------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_offline_scoring_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"response": str(i), "label": 3, "id": i} for i in range(10)]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out" / "scored.jsonl"
    arguments = ["score", "--rm-type", "math", "--input", str(source), "--output", str(target), "--batch-size", "4"]
    main(arguments)
    assert read(target) == [{**row, "score": float(row["id"] == 3)} for row in rows]
    assert "10 scored, 0 kept from before, mean score 0.1000" in capsys.readouterr().out
    main(arguments)
    assert "0 scored, 10 kept from before, mean score 0.1000" in capsys.readouterr().out


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    rows = [{"response": str(i), "label": 3} for i in range(9)]
    source = write(tmp_path / "in.jsonl", rows)
    score_file(source, tmp_path / "whole.jsonl", "math")
    whole = (tmp_path / "whole.jsonl").read_text()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "part.jsonl").write_text(whole[:cut])
        summary = score_file(source, tmp_path / "part.jsonl", "math", batch_size=2)
        assert (tmp_path / "part.jsonl").read_text() == whole
        assert summary.resumed == whole[:cut].count("\n")
        assert summary.mean == pytest.approx(1 / 9)


def test_offline_mistakes_name_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"response": "1", "label": 1}, {"response": "1"}])
    with pytest.raises(RewardError, match=r"sample .*in.jsonl:2 has label None"):
        score_file(source, tmp_path / "out.jsonl", "math")
    source.write_text('{"response": "1", "label": 1}\nnot json\n')
    with pytest.raises(RewardError, match=r"in.jsonl:2 is no JSON"):
        score_file(source, tmp_path / "out.jsonl", "math")
    other = write(tmp_path / "other.jsonl", [{"response": "1", "label": 1, "score": 1.0}])
    with pytest.raises(RewardError, match=r"other.jsonl:1 is not row 1 of"):
        score_file(write(source, [{"response": "2", "label": 1}]), other, "math")
    with pytest.raises(RewardError, match="is the input"):
        score_file(source, source, "math")
    with pytest.raises(SystemExit) as stop:
        main(["score", "--rm-type", "maths", "--input", str(source), "--output", str(tmp_path / "x")])
    assert stop.value.code == 1
    assert "Did you mean 'math'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--options", "{bad"], "--options '{bad' cannot be read"),
        (["--options", "no.yaml"], "--options 'no.yaml' cannot be read"),
        (["--options", '{"math": {"nope": 1}}'], "unknown option 'nope' of the math reward"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--rm-type", "remote_rm"], "--rm-url"),
        (["--rm-type", "ocr"], "image 5 cannot be read"),
        (["--input", "{folder}/bytes.jsonl"], "bytes.jsonl:1 is no JSON"),
        (["--input", "{folder}/none.jsonl"], "none.jsonl"),
        (["--output", "{folder}/garbage"], "garbage:1 is not row 1"),
    ],
)
def test_offline_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"response": "1", "label": 1, "image": 5, "prompt": '"a"'}])
    (tmp_path / "bytes.jsonl").write_bytes(b'\xff{"response": "1"}\n')
    (tmp_path / "garbage").write_text("no json\n")
    given = {"--rm-type": "math", "--input": str(source), "--output": str(tmp_path / "out.jsonl")}
    given |= {arguments[0]: arguments[1].replace("{folder}", str(tmp_path))}
    with pytest.raises(SystemExit) as stop:
        main(["score", *(word for pair in given.items() for word in pair)])
    assert stop.value.code == 1
    assert message in (shown := capsys.readouterr().err)
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rm-type", "remote_rm"], "--rm-url"),
        (["--rm-type", "math", "--options", '{"math": {"nope": 1}}'], "unknown option 'nope'"),
        (["--rm-type", "math", "--port", "70000"], "--port 70000"),
    ],
)
def test_a_service_that_could_not_score_does_not_start(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments])
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


def test_offline_columns_and_images(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(random_image(0)).save(tmp_path / "a.png")
    rows = [{"picture": "a.png"}, {"picture": ["a.png", "a.png"]}]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    arguments = ["score", "--rm-type", "jpeg_compressibility", "--input", str(source), "--output", str(target)]
    main([*arguments, "--key.image", "picture", "--key.score", "size"])
    expected = score([RewardRequest(image=random_image(0))], "jpeg_compressibility")[0]
    assert [row["size"] for row in read(target)] == [expected] * 2


def test_options_from_json_and_files(tmp_path: Path) -> None:
    assert read_options('{"ocr": {"num_frames": 4}}', "http://x") == {
        "ocr": {"num_frames": 4},
        "remote_rm": {"url": "http://x"},
    }
    (tmp_path / "options.yaml").write_text("ocr:\n  num_frames: 4\n")
    assert read_options(str(tmp_path / "options.yaml"), None) == {"ocr": {"num_frames": 4}}
    with pytest.raises(UnknownRewardError, match="'ocr'"):
        read_options('{"ocrr": {}}', None)
    with pytest.raises(ValueError, match="--options"):
        read_options('{"ocr": 1}', None)
