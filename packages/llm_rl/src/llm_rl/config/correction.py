"""How a run corrects for rollouts that were not drawn by the policy that trains. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared_runtime.config import Problems


@dataclass(frozen=True)
class CorrectionConfig:
    """Importance sampling and rejection between the policy that sampled and the one that trains.

    Bounds, levels and modes are parameters of the correction function: `--tis-clip` and `--tis-clip-low` of the
    built-in one and of `llm_rl.algorithms.rollout_correction.icepop`, the others of
    `llm_rl.algorithms.mis.mis_correction`.
    """

    get_mismatch_metrics: bool = False
    """Log how far the engine's probabilities are from the trainer's, without changing the loss."""
    use_tis: bool = False
    """Weight the policy loss by pi_train / pi_rollout, truncated, or by --custom-tis-function-path."""
    use_rs: bool = False
    """Reject tokens or sequences whose weight lies outside the --rs bounds."""
    tis_clip: float = 2.0
    """Largest importance weight."""
    tis_clip_low: float | None = None
    """Smallest importance weight. Unset: 0, and 0.5 with icepop."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, product over the sequence, or its geometric mean."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Weights outside the bounds: min with the upper one, clamp to both, or 0."""
    tis_lower_bound: float | None = None
    """Lower bound of the weights; clip and mask need it."""
    tis_upper_bound: float = 2.0
    """Upper bound of the weights."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step; not with the geometric level."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of rejection."""
    rs_lower_bound: float | None = None
    """Unset: --tis-lower-bound."""
    rs_upper_bound: float | None = None
    """Unset: --tis-upper-bound."""
    rs_veto_threshold: float | None = None
    """Reject a whole sequence if one of its tokens has a ratio below this; typically 1e-4 to 1e-6."""

    @property
    def corrects_rollouts(self) -> bool:
        """Whether weights or rejection change the loss."""
        return self.use_tis or self.use_rs or self.rs_veto_threshold is not None


def check_correction(
    config: CorrectionConfig, problems: Problems, *, loss_type: str, use_rollout_logprobs: bool, function: str | None
) -> None:
    """Note what can't work whatever the correction function is.

    Args:
        config: The flags.
        problems: Where it is noted.
        loss_type: `--loss-type`.
        use_rollout_logprobs: `--use-rollout-logprobs`.
        function: `--custom-tis-function-path`.
    """
    if not config.corrects_rollouts:
        if function is not None:
            problems.add("--custom-tis-function-path is called only with --use-tis, --use-rs or --rs-veto-threshold")
        return
    if use_rollout_logprobs:
        problems.add(
            "--use-rollout-logprobs makes the engine's policy the old one, so there is nothing left to correct: "
            "leave it out, or --use-tis and --use-rs"
        )
    if loss_type != "policy_loss":
        problems.add(f"--use-tis and --use-rs correct the policy loss, not --loss-type {loss_type}")
