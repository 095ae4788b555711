"""Settings of the models that a run may have besides the policy and its reference. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shared_runtime.config import Problems
from shared_runtime.config.problems import flag


@dataclass(frozen=True)
class CriticConfig:
    """The value model of --advantage-estimator ppo, on the policy's devices."""

    critic_load: Path | None = None
    """Hugging Face directory of its initial weights. Unset: --hf-checkpoint. A missing value head starts at zero."""
    critic_lr: float | None = None
    """Its peak learning rate. Unset: --lr."""
    critic_lr_warmup_iters: int = 0
    """Optimizer steps of its linear warm-up."""
    num_critic_only_steps: int = 0
    """First rollouts, in which the critic learns and the policy stays."""
    value_clip: float = 0.2
    """Largest change of a prediction that still improves the value loss."""

    def check(self, problems: Problems, *, used: bool, num_rollout: int | None) -> None:
        """Note what no critic takes, and settings of a critic that the run doesn't have.

        Args:
            problems: Gets them.
            used: Whether the estimator is ppo.
            num_rollout: Rollouts of the run, where that is known.
        """
        problems.positive(critic_lr=self.critic_lr, value_clip=self.value_clip)
        problems.not_negative(
            critic_lr_warmup_iters=self.critic_lr_warmup_iters, num_critic_only_steps=self.num_critic_only_steps
        )
        if not used:
            for name in changed(self):
                problems.add(f"{flag(name)} sets up the critic: it needs --advantage-estimator ppo")
        elif num_rollout is not None and self.num_critic_only_steps >= num_rollout:
            problems.add(
                f"--num-critic-only-steps {self.num_critic_only_steps} leaves none of the {num_rollout} rollouts to "
                "the policy"
            )


def changed(group: CriticConfig) -> list[str]:
    """Fields that differ from their default."""
    return [f.name for f in dataclasses.fields(group) if getattr(group, f.name) != f.default]
