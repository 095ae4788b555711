"""Single calls to a server's control endpoints: small JSON in and out, no connection kept."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

# Engines are on this network; a proxy of the environment is for the world outside.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpError(RuntimeError):
    """A server that answers with an error, or not at all.

    Attributes:
        status: HTTP status, `None` where no answer came.
    """

    def __init__(self, url: str, status: int | None, reason: str) -> None:
        self.status = status
        super().__init__(f"{url}: {reason}" if status is None else f"{url} answered {status}: {reason}")


def call(url: str, body: Any = None, *, timeout_s: float) -> Any:
    """GET a URL, or POST `body` to it as JSON.

    Returns:
        The answer: parsed where it is JSON, otherwise text.

    Raises:
        HttpError: For any answer but 2xx, and for none within `timeout_s`.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data is not None else {})
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise HttpError(url, error.code, error.read().decode(errors="replace").strip()[:2000]) from None
    except OSError as error:
        raise HttpError(url, None, f"no answer ({getattr(error, 'reason', error)})") from None
    try:
        return json.loads(text)
    except ValueError:
        return text
