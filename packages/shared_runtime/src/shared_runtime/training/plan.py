"""Which rank trains what in which micro-batch: pure planning over sequence lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepPlan:
    """One rank's share of one optimizer step.

    Attributes:
        rows: This rank's training rows.
        micro_batches: Indices into `rows`, one list a forward pass. All ranks have the same number of
            micro-batches, since each contains collectives; a list may be empty.
        global_num_samples: Samples of the step over all ranks (a rollout split into several rows counts once).
        global_num_tokens: Trainable tokens of the step over all ranks.
    """

    rows: list[dict[str, Any]]
    micro_batches: list[list[int]]
    global_num_samples: int
    global_num_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
