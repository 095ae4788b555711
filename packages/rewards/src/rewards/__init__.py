"""Graders and scorers for text, images and video, usable alone.

    from rewards import RewardRequest, score

    score([RewardRequest("so it is \\\\boxed{95}", label="95")], rm_type="math")  # [1.0]

Nothing heavy is imported here: a reward's own dependencies load when it is first used.
"""

from rewards.registry import known_rm_types, needs_label
from rewards.request import (
    LabelError,
    MissingExtraError,
    RewardError,
    RewardRequest,
    RewardServiceError,
    Score,
    UnknownRewardError,
)
from rewards.scoring import score

__all__ = [
    "LabelError",
    "MissingExtraError",
    "RewardError",
    "RewardRequest",
    "RewardServiceError",
    "Score",
    "UnknownRewardError",
    "known_rm_types",
    "needs_label",
    "score",
]
