"""The client of reward services: retries, a time-out, and errors that name the sample. A failure is never a score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from rewards.request import RewardServiceError, Score

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})


class RewardClient:
    """Posts JSON to one service, from any number of threads.

    Connection errors, time-outs and the answers 408, 429 and 5xx are tried again after `backoff_s`, twice that, and so
    on, up to `max_backoff_s`. Any other answer, and the last failure, is a `RewardServiceError` that names the sample.
    A teacher that serves log-probabilities takes the same client: `post` returns any JSON.

    Args:
        url: Where to post, e.g. `http://host:8000/score`.
        timeout_s: Seconds a try may take.
        retries: Tries after the first.
        backoff_s: Seconds before the first retry.
        max_backoff_s: The most seconds before a retry.
        concurrency: Requests in flight at once in `post_all`.
        headers: Sent with every request.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"reward service url {url!r} must begin with http:// or https:// (--rm-url)")
        self.url = url
        self.retries, self.backoff_s, self.max_backoff_s = retries, backoff_s, max_backoff_s
        self.concurrency = concurrency
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.Client(timeout=timeout_s, limits=limits, headers=headers, trust_env=False)

    def post(self, payload: Any, name: str) -> Any:
        """Post one JSON payload.

        Args:
            payload: What to send.
            name: How errors name it, e.g. `"sample 17"`.

        Returns:
            The JSON of the answer.

        Raises:
            RewardServiceError: Every try failed, the service refused, or it answered no JSON.
        """
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(self.backoff_s * 2 ** (attempt - 1), self.max_backoff_s))
            try:
                response = self._client.post(self.url, json=payload)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _RETRIED or response.status_code >= 500:
                failure = f"HTTP {response.status_code}: {response.text[:200]}"
                continue
            if response.status_code >= 400:
                raise RewardServiceError(
                    f"{name}: {self.url} refused the request with HTTP {response.status_code}: {response.text[:500]}"
                )
            try:
                return response.json()
            except ValueError as error:
                raise RewardServiceError(f"{name}: {self.url} answered no JSON: {response.text[:200]!r}") from error
        raise RewardServiceError(f"{name}: {self.url} failed {self.retries + 1} times, the last time with {failure}")

    def post_all(self, payloads: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Post every payload, `concurrency` at a time; answers in the order of the payloads.

        Raises:
            RewardServiceError: One of them failed; those not yet sent are not sent.
        """
        return map_concurrently(self.post, list(zip(payloads, names, strict=True)), self.concurrency)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def map_concurrently(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], concurrency: int) -> list[Any]:
    """`function` over the argument tuples in threads; results in order. The first error cancels what has not begun."""
    if len(arguments) == 1:
        return [function(*arguments[0])]
    with ThreadPoolExecutor(max_workers=max(1, min(concurrency, len(arguments)))) as executor:
        futures = [executor.submit(function, *entry) for entry in arguments]
        try:
            return [future.result() for future in futures]
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def checked_score(value: Any, name: str, source: str) -> Score:
    """A score as a service answered it: a finite number, or a mapping with at least one.

    Raises:
        RewardServiceError: It is anything else; `None`, `true`, NaN and an empty mapping included.
    """
    if _is_number(value):
        return float(value)
    if isinstance(value, Mapping) and any(_is_number(entry) for entry in value.values()):
        bad = [key for key, entry in value.items() if isinstance(entry, float) and not math.isfinite(entry)]
        if not bad:
            return dict(value)
    raise RewardServiceError(f"{name}: {source} answered {value!r:.200}, which is no finite score")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
