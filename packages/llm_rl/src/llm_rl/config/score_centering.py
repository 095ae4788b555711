"""Score centering: how the expected score under the sampler is taken out of the policy gradient. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shared_runtime.config import Problems
from shared_runtime.config.problems import flag

if TYPE_CHECKING:
    from llm_rl.config.train import TrainConfig


@dataclass(frozen=True)
class ScoreCenteringConfig:
    """Score centering, with --loss-type score_centering."""

    score_centering_is: Literal["none", "tis", "mis"] = "none"
    """Importance weights of scores: none, truncated, or masked outside of bounds."""
    score_centering_tis_clip: float = 2.0
    """Largest weight of tis."""
    score_centering_mis_low: float = 0.5
    """Smallest weight that mis keeps."""
    score_centering_mis_high: float = 5.0
    """Largest weight that mis keeps."""


def check_score_centering(config: TrainConfig, problems: Problems) -> None:
    """Note what score centering can't work with, and its settings in a run without it."""
    centering, num = config.score_centering, config.sampling.rollout_top_logprobs_num
    problems.not_negative(
        rollout_top_logprobs_num=num,
        score_centering_mis_low=centering.score_centering_mis_low,
    )
    problems.positive(score_centering_tis_clip=centering.score_centering_tis_clip)
    low, high = centering.score_centering_mis_low, centering.score_centering_mis_high
    problems.require(low <= high, f"--score-centering-mis-low {low} is above --score-centering-mis-high {high}")
    if config.algorithm.loss_type != "score_centering":
        if num:
            problems.add("--rollout-top-logprobs-num records candidates that only --loss-type score_centering reads")
        for f in dataclasses.fields(centering):
            if getattr(centering, f.name) != f.default:
                problems.add(f"{flag(f.name)} has no effect without --loss-type score_centering")
        return
    if num == 0:
        problems.add(
            "--loss-type score_centering needs --rollout-top-logprobs-num, the candidates at each position that stand "
            "for the sampler's distribution (128, or as many as the vocabulary has)"
        )
    top_k = config.sampling.rollout_top_k
    if 0 < num < top_k:
        problems.add(
            f"--rollout-top-logprobs-num {num} can't hold the --rollout-top-k {top_k} tokens that are drawn from"
        )
    if config.algorithm.advantage_estimator != "grpo":
        problems.add(
            "--loss-type score_centering takes the advantages of --advantage-estimator grpo, not of "
            f"{config.algorithm.advantage_estimator}"
        )
    excluded = {
        "--use-opd": config.distillation.use_opd,
        "--use-opsm": config.algorithm.use_opsm,
        "--normalize-advantages": config.algorithm.normalize_advantages,
        "--custom-pg-loss-reducer-function-path": config.hooks.custom_pg_loss_reducer_function_path,
        "--custom-convert-samples-to-train-data-path": config.hooks.custom_convert_samples_to_train_data_path,
    }
    for name, value in excluded.items():
        if value:
            problems.add(f"{name} does not go together with --loss-type score_centering")
