"""Names of metrics that more than one sink looks for."""

from __future__ import annotations

from collections.abc import Mapping

# Any of these is the reward of the rollout, the first one present wins.
REWARD = ("rollout/raw_reward", "rollout/reward/raw_mean", "rollout/reward")

_EVAL = "eval/"
# Numbers about an evaluation, not results of one.
_NOT_A_SET = ("lag_steps", "export_time_seconds", "skipped_")
_NOT_A_SCORE = ("-truncated_ratio", "-pass@", "_time", "_len")


def first_of(metrics: Mapping[str, float | None], keys: tuple[str, ...]) -> float | None:
    """The first of `keys` that has a value."""
    return next((metrics[key] for key in keys if metrics.get(key) is not None), None)


def eval_scores(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The score of each evaluation set in a row: `{"sums": 0.31}` for `eval/sums`.

    Deeper keys (`eval/sums/response_len`) and numbers about the evaluation itself are left out.
    """
    scores = {}
    for key, value in metrics.items():
        name = key.removeprefix(_EVAL)
        if value is None or name == key or "/" in name:
            continue
        if name.startswith(_NOT_A_SET) or any(mark in name for mark in _NOT_A_SCORE):
            continue
        scores[name] = float(value)
    return scores
