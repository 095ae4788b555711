"""What a domain (language models, diffusion models) brings to the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from shared_runtime.rollout.types import RolloutResult
from shared_runtime.tracking.sink import LoggedImage
from shared_runtime.training.plan import StepPlan


class Domain(Protocol):
    """What differs between language and diffusion runs."""

    async def rollout(self, rollout_id: int) -> RolloutResult[Any]:
        """Sample and score one rollout; its metrics include `perf/rollout_time` and `perf/reward_time`."""

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the evaluation sets; keys `eval/<set>`. `rollout_id` is the last rollout done, -1 before the first."""

    def plan(self, rollout_id: int, rollout: RolloutResult[Any]) -> list[list[StepPlan]]:
        """Optimizer steps for each trainer rank."""

    def sample_rows(self, rollout: RolloutResult[Any]) -> list[dict[str, Any]]:
        """Rows for `samples.jsonl`."""

    def sample_images(self, rollout_id: int, rollout: RolloutResult[Any]) -> list[LoggedImage]:
        """Pictures of the rollout to log; empty where there are none, or where it is not their turn."""

    def save(self, directory: Path) -> None:
        """Write everything that decides the next rollout into a checkpoint's directory."""

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
