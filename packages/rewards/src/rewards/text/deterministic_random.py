"""`deterministic_random`: a coin that falls the same way for the same response."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def grade(response: str, tokens: Sequence[int] | None = None, prompt: str | None = None) -> float:
    """0.0 or 1.0: the parity of the first byte of sha256(str(list of token ids) + response).

    The same sample has the same score in every process and run, so a resumed run can be compared with one that was
    not interrupted.

    Args:
        response: What the model wrote.
        tokens: Token ids of prompt and response.
        prompt: Stands in for the tokens where there are none.
    """
    content = (prompt or "") if tokens is None else str([int(token) for token in tokens])
    digest = hashlib.sha256((content + response).encode("utf-8", "surrogatepass")).digest()
    return float(digest[0] % 2)
