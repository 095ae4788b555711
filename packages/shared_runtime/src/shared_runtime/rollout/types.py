"""What rollout functions return, and the errors of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)


class RolloutError(RuntimeError):
    """A rollout that can't go on. The message names the sample, or the filter, and what to do."""


@dataclass
class RolloutFnTrainOutput(Generic[S]):
    """What a rollout function returns for training.

    Attributes:
        samples: The groups to train on, ordered by `group_index`, each ordered by `index`.
        metrics: Added to the step's metrics.
    """

    samples: list[list[S]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns for evaluation.

    Attributes:
        data: For every evaluation set a dict with `rewards`, `truncated` and `samples`, one entry a sample.
        metrics: Added to the step's metrics.
    """

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RolloutResult(RolloutFnTrainOutput[S]):
    """What the executor returns: the groups, and where the others and the time went.

    Attributes:
        rejected: Finished groups that are not trained on (filtered, aborted, nothing left of them), for hooks and logs.
        generate_seconds: Wall time until the last generation ended.
        score_seconds: The wall time after that, in which only scores were waited for.
        scoring_seconds: Wall time during which at least one sample was being scored.
    """

    rejected: list[list[S]] = field(default_factory=list)
    generate_seconds: float = 0.0
    score_seconds: float = 0.0
    scoring_seconds: float = 0.0

    @property
    def scoring_overlap(self) -> float:
        """The share of the scoring that went on while others were still generated."""
        return max(0.0, 1.0 - self.score_seconds / self.scoring_seconds) if self.scoring_seconds > 0 else 0.0

    def all_samples(self) -> list[list[S]]:
        """Every finished group, those rejected included, ordered by `group_index`."""
        return sorted(self.samples + self.rejected, key=lambda group: group[0].group_index)


def name_sample(sample: BaseSample) -> str:
    """How messages name a sample: its index, its group and the head of its prompt."""
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = next((str(m.get("content")) for m in reversed(prompt) if m.get("content")), "")
    head = prompt if len(prompt) <= 60 else prompt[:57] + "…"
    return f"sample {sample.index} (group {sample.group_index}, prompt {head!r})"
