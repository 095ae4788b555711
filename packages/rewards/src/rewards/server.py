"""A reward service over HTTP: `rewards serve` (extra: `serve`). The other end of `remote_rm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import anyio
import anyio.to_thread

from rewards.request import (
    LabelError,
    MissingExtraError,
    RewardError,
    RewardRequest,
    RewardServiceError,
    Score,
    UnknownRewardError,
)
from rewards.scoring import prepare, score
from rewards.wire import from_wire

try:
    import uvicorn
    from fastapi import Body, FastAPI, HTTPException
    from pydantic import BaseModel, ConfigDict, Field
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"rewards serve needs {error.name}: install the extra with `uv pip install 'tandem-rewards[serve]'`."
    ) from error


class ScoreRequest(BaseModel):
    """One sample to be scored."""

    model_config = ConfigDict(extra="forbid")

    response: str | None = Field("", description="What the model wrote; image rewards ignore it.")
    label: Any = Field(None, description="The reference answer, for rewards that need one.")
    prompt: str | list[dict[str, Any]] | None = Field(None, description="The prompt; chat messages count as JSON text.")
    metadata: dict[str, Any] | None = Field(None, description="The row's own data.")
    image: str | list[str] | None = Field(None, description="Base64 of a PNG or JPEG file; a list is a video.")
    sample_id: int | str | None = Field(None, description="How errors name the sample.")
    tokens: list[int] | None = Field(None, description="Token ids, for deterministic_random.")


class BatchRequest(BaseModel):
    """Several samples to be scored together."""

    model_config = ConfigDict(extra="forbid")

    requests: list[ScoreRequest]


class BatchResponse(BaseModel):
    """One score a request, in order."""

    scores: list[float | dict[str, Any]]


class Status(BaseModel):
    """What the service does, and how much of it."""

    rm_type: str
    running: int = Field(description="Requests being scored.")
    waiting: int = Field(description="Requests that wait for their turn.")
    scored: int = Field(description="Samples scored since the start.")


def create_app(
    rm_type: str,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    max_concurrency: int = 8,
    max_waiting: int = 1024,
    max_body_mb: float = 64.0,
) -> FastAPI:
    """The service of one reward.

    `POST /score` takes one sample and answers its score, a number or an object; `POST /score_batch` takes many.
    `GET /health` is the status; `GET /openapi.json` and `/docs` are the schema. A sample that cannot be scored is a
    422 whose `detail` names it; too large a body is a 413; a full queue is a 503, which clients try again.

    Args:
        rm_type: The reward. A sample cannot choose another one.
        options: Options of rewards by name, as `score` takes them.
        max_concurrency: Requests scored at once, in threads.
        max_waiting: Requests that may wait for that; more are refused with 503.
        max_body_mb: Largest body in MB.

    Raises:
        UnknownRewardError: No such reward.
        ValueError: Its options are wrong.
    """
    prepare(rm_type, options=options)
    app = FastAPI(title=f"Reward service: {rm_type}", version="1", docs_url="/docs")
    app.add_middleware(BodyLimit, max_bytes=int(max_body_mb * 1_000_000))
    limiter: list[anyio.CapacityLimiter] = []
    counts = {"waiting": 0, "running": 0, "scored": 0}

    async def run(items: list[ScoreRequest]) -> list[Score]:
        if counts["waiting"] >= max_waiting:
            raise HTTPException(503, f"{max_waiting} requests are waiting", headers={"Retry-After": "1"})
        if not limiter:
            limiter.append(anyio.CapacityLimiter(max_concurrency))  # needs the running event loop
        counts["waiting"] += 1
        try:
            async with limiter[0]:
                counts["waiting"] -= 1
                counts["running"] += 1
                try:
                    scores = await anyio.to_thread.run_sync(_score, items, rm_type, options)
                finally:
                    counts["running"] -= 1
                    counts["waiting"] += 1
        finally:
            counts["waiting"] -= 1
        counts["scored"] += len(items)
        return scores

    @app.post("/score", summary="Score one sample")
    async def score_one(item: Annotated[ScoreRequest, Body()]) -> float | dict[str, Any]:
        return (await run([item]))[0]

    @app.post("/score_batch", summary="Score several samples")
    async def score_batch(batch: BatchRequest) -> BatchResponse:
        return BatchResponse(scores=await run(batch.requests))

    @app.get("/health", summary="Status")
    async def health() -> Status:
        return Status(rm_type=rm_type, **counts)

    return app


def listen(app: FastAPI, host: str, port: int) -> None:
    """Serve until stopped."""
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def _score(items: list[ScoreRequest], rm_type: str, options: Mapping[str, Mapping[str, Any]] | None) -> list[Score]:
    """Score in a worker thread; a sample that cannot be scored becomes the HTTP error that names it."""
    try:
        return score([_request(item, index, rm_type) for index, item in enumerate(items)], rm_type, options=options)
    except (LabelError, UnknownRewardError) as error:
        raise HTTPException(422, str(error)) from error
    except RewardServiceError as error:
        raise HTTPException(502, str(error)) from error
    except RewardError as error:
        raise HTTPException(500, str(error)) from error


def _request(item: ScoreRequest, index: int, rm_type: str) -> RewardRequest:
    name = f"sample {index if item.sample_id is None else item.sample_id}"
    own = (item.metadata or {}).get("rm_type")
    if own not in (None, rm_type):
        raise LabelError(f"{name} asks for rm_type {own!r}, and this service scores {rm_type!r}")
    data = {key: value for key, value in item.model_dump().items() if value is not None}
    if isinstance(item.prompt, list):
        import json

        data["prompt"] = json.dumps(item.prompt, ensure_ascii=False)
    try:
        return from_wire(data)
    except ValueError as error:
        raise LabelError(f"{name}: {error}") from error


class BodyLimit:
    """ASGI middleware: a body over `max_bytes` is answered 413, whether or not it says its length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the limit, then hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        body, more = bytearray(), int(length) <= self._max_bytes if length.isdigit() else True
        too_large = not more
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            too_large = len(body) > self._max_bytes
            more = message.get("more_body", False) and not too_large
        if too_large:
            detail = f'{{"detail":"the body is over {self._max_bytes} bytes (--max-body-mb)"}}'.encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(detail)).encode())]
            await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
            await send({"type": "http.response.body", "body": detail})
            return
        pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)
