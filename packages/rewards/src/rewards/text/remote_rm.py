"""`remote_rm`: the score of a reward service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewards.client import RewardClient, checked_score
from rewards.request import RewardRequest, Score
from rewards.wire import to_wire


class RemoteReward:
    """Posts each request to a service, `{"prompt", "response", "label", ...}`, and takes the JSON it answers.

    That is a number or an object with named numbers; `rewards serve` answers so at `/score`, and so do services
    written for other trainers. Connection errors and 5xx are retried with backoff; after that the error names the
    sample. A failure is never a score of 0.

    Args:
        url: The service (`--rm-url`).
        timeout_s: Seconds a try may take.
        retries: Tries after the first.
        backoff_s: Seconds before the first retry; doubled for each further one.
        concurrency: Requests in flight at once.
        headers: Sent with every request.
    """

    def __init__(
        self,
        url: str = "",
        *,
        timeout_s: float = 60.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url:
            raise ValueError('remote_rm needs a service: set --rm-url, or options={"remote_rm": {"url": ...}}')
        self._client = RewardClient(
            url, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, concurrency=concurrency, headers=headers
        )

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One answer a request, in order."""
        names = [f"sample {request.sample_id}" for request in requests]
        payloads = [{"prompt": None, "label": None, **to_wire(request)} for request in requests]
        for payload in payloads:  # the service decides by its own --rm-type
            if "rm_type" in payload.get("metadata", {}):
                payload["metadata"] = {key: value for key, value in payload["metadata"].items() if key != "rm_type"}
        answers = self._client.post_all(payloads, names)
        return [checked_score(answer, name, self._client.url) for answer, name in zip(answers, names, strict=True)]
