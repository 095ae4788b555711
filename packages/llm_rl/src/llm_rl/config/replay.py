"""Sampling-support replay: training under the filtered distribution that tokens were drawn from. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_runtime.config import Problems

if TYPE_CHECKING:
    from llm_rl.config.train import TrainConfig


def check_replay(config: TrainConfig, problems: Problems) -> None:
    """Note what can't be replayed, and what needs probabilities over the whole vocabulary besides."""
    sampling, algorithm = config.sampling, config.algorithm
    if not config.replays_support:
        return
    filters = f"--rollout-top-p {sampling.rollout_top_p} --rollout-top-k {sampling.rollout_top_k}"
    if sampling.rollout_top_p < 1 and sampling.rollout_top_k < 1:
        problems.add(
            f"--rollout-top-p {sampling.rollout_top_p} needs a positive --rollout-top-k, which bounds the tokens that "
            "are recorded at each position"
        )
    excluded = {
        "--use-kl-loss": algorithm.use_kl_loss,
        "--kl-coef": algorithm.kl_coef > 0,
        "--use-opd": config.distillation.use_opd,
    }
    for name, value in excluded.items():
        if value:
            problems.add(
                f"{name} compares probabilities over the whole vocabulary, but with {filters} the policy's are those "
                "over the tokens that the filters left: sample with --rollout-top-p 1 --rollout-top-k -1"
            )
