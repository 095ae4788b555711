"""What a domain (language models, diffusion models) brings to the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared_runtime.training.plan import StepPlan


@dataclass
class RolloutResult:
    """What one rollout gives: its samples (all of them, for the logs), metrics, and anything the domain needs."""

    samples: Sequence[Any]
    metrics: dict[str, float]
    data: Any = None


class Domain(Protocol):
    """What differs between language and diffusion runs."""

    async def rollout(self, rollout_id: int) -> RolloutResult:
        """Sample and score one rollout; `perf/rollout_time` and `perf/reward_time` are among its metrics."""

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the evaluation sets; keys `eval/<set>`."""

    def plan(self, rollout_id: int, rollout: RolloutResult) -> list[list[StepPlan]]:
        """Optimizer steps for each trainer rank."""

    def sample_rows(self, rollout: RolloutResult) -> list[dict[str, Any]]:
        """Rows for `samples.jsonl`."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next rollout, as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
