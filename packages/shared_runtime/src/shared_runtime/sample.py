"""The sample that travels through a run: what the runtime knows of it.

A domain package subclasses :class:`BaseSample` and adds its own fields (token ids, latents). The runtime
reads and writes only what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Where a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class BaseSample:
    """One response to one prompt.

    Attributes:
        index: Global id, unique within a run and stable over a resume. Seeds derive from it.
        group_index: Global id of the group: the samples that answer the same drawn prompt.
        prompt: The prompt text, or a list of chat messages.
        label: What the reward compares with.
        metadata: The row's own metadata; `metadata["rm_type"]` overrides the run's reward.
        reward: The raw reward, or a dict of named parts; `None` until scored.
        status: Where the sample stands.
        remove_sample: Excluded from the loss (advantage normalisation still sees it).
        weight_version_dispatched: Version of the weights when the request was sent.
        weight_version_returned: Version of the weights when the response came back.
    """

    index: int = 0
    group_index: int = 0
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    reward: float | dict[str, Any] | None = None
    status: Status = Status.PENDING
    remove_sample: bool = False
    weight_version_dispatched: int | None = None
    weight_version_returned: int | None = None

    def scalar_reward(self, key: str | None = None) -> float:
        """The reward as one number; `key` picks from a dict reward (default: `score`).

        Raises:
            ValueError: If the sample has no reward yet or the dict lacks the key.
        """
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward yet")
        if isinstance(self.reward, dict):
            name = key or "score"
            if name not in self.reward:
                raise ValueError(f"sample {self.index}: reward has no key {name!r}, only {sorted(self.reward)}")
            return float(self.reward[name])
        return float(self.reward)
