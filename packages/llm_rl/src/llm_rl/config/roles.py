"""Settings of the models that a run may have besides the policy and its reference. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation: a teacher's log-probs on the student's own samples become part of the advantage."""

    use_opd: bool = False
    """Subtract the reverse KL to a teacher from the advantages of any estimator."""
    opd_type: Literal["sglang", "fsdp"] | None = None
    """Where the teacher is: a server with SGLang's /generate, or loaded in the trainer. Needed with --use-opd."""
    opd_kl_coef: float = 1.0
    """Weight of the reverse KL."""
    opd_log_prob_top_k: int = 0
    """Compare this many likely tokens at each position (16 in the paper); 0 compares the sampled token."""
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = "only-student"
    """Which likely tokens: the student's, the teacher's, those in both, in either, in exactly one."""
    opd_reward_weight_mode: Literal["student_p", "teacher_p", "none"] = "student_p"
    """What weighs them: the student's probabilities, the teacher's, or nothing."""
    opd_teacher_load: Path | None = None
    """Hugging Face directory of the teacher, with --opd-type fsdp."""
    opd_teacher_urls: tuple[str, ...] = ()
    """Several teachers, with --opd-type sglang: `NAME=URL` words; `default` is the fallback. Unset: --rm-url."""
    opd_teacher_key: str = "opd_teacher"
    """Key of the metadata that names a sample's teacher."""

    def check(self, problems: Problems, *, rm_url: str | None, temperature: float) -> None:
        """Note a distillation without a teacher, and what its kind of teacher can't do.

        Args:
            problems: Gets them.
            rm_url: `--rm-url`, where a single remote teacher is.
            temperature: Of the rollout.
        """
        problems.not_negative(opd_kl_coef=self.opd_kl_coef, opd_log_prob_top_k=self.opd_log_prob_top_k)
        if not self.use_opd:
            for name in changed(self):
                problems.add(f"{flag(name)} has no effect without --use-opd")
            return
        if self.opd_type is None:
            problems.add("--use-opd needs a teacher: --opd-type fsdp or --opd-type sglang")
        if (self.opd_type == "fsdp") != (self.opd_teacher_load is not None):
            problems.add("--opd-type fsdp and --opd-teacher-load, the directory of its teacher, go together")
        if self.opd_type == "sglang":
            self._check_remote(problems, rm_url, temperature)
        elif self.opd_teacher_urls:
            problems.add("--opd-teacher-urls names servers: it needs --opd-type sglang")

    def _check_remote(self, problems: Problems, rm_url: str | None, temperature: float) -> None:
        if not self.opd_teacher_urls and rm_url is None:
            problems.add("--opd-type sglang needs a teacher: --opd-teacher-urls NAME=URL ..., or --rm-url")
        for word in self.opd_teacher_urls:
            name, _, url = word.partition("=")
            problems.require(
                bool(name) and url.startswith(("http://", "https://")),
                f"--opd-teacher-urls takes NAME=URL with an http address, got {word}",
            )
        names = [word.partition("=")[0] for word in self.opd_teacher_urls]
        problems.require(len(set(names)) == len(names), "--opd-teacher-urls: two teachers have the same name")
        problems.require(
            temperature == 1,
            f"--opd-type sglang needs --rollout-temperature 1, not {temperature}: the server's log-probs of a prompt "
            "are those at temperature 1",
        )

    @property
    def remote(self) -> bool:
        """Whether teachers are servers."""
        return self.use_opd and self.opd_type == "sglang"

    def teachers(self, rm_url: str | None) -> dict[str, str]:
        """Addresses of remote teachers by name; a single one is called `default`."""
        if self.opd_teacher_urls:
            return {name: url for name, _, url in (word.partition("=") for word in self.opd_teacher_urls)}
        return {"default": rm_url} if rm_url is not None else {}


def changed(group: CriticConfig | DistillationConfig) -> list[str]:
    """Fields that differ from their default."""
    return [f.name for f in dataclasses.fields(group) if getattr(group, f.name) != f.default]
