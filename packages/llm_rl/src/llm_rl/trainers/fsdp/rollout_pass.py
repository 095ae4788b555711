"""What happens to one rollout on one rank: log-probs before the first step, advantages, optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llm_rl.algorithms.candidates import support_log_probs
from llm_rl.algorithms.log_probs import TokenLogProbs, log_probs_from_logits
from llm_rl.algorithms.metrics import log_prob_abs_diff, merge_metrics
from llm_rl.algorithms.opd import distill_advantages
from llm_rl.trainers.fsdp.advantages import set_advantages
from llm_rl.trainers.fsdp.batch import MicroBatch, collate
from llm_rl.trainers.fsdp.correction import correct_step, correction_function, rollout_mismatch
from llm_rl.trainers.fsdp.distillation import reverse_kl
from llm_rl.trainers.fsdp.forward import response_logits
from llm_rl.trainers.fsdp.loss import compute_loss
from shared_runtime.training.fsdp import set_last_micro_batch
from shared_runtime.training.metrics import RunningMetrics
from shared_runtime.training.plan import StepPlan

if TYPE_CHECKING:
    from llm_rl.trainers.fsdp.trainer import FsdpTrainer


class RolloutPass:
    """Trains one rollout.

    Args:
        trainer: The rank's trainer.
        rollout_id: Which rollout; also the version of the weights that train it.
        steps: This rank's share.
    """

    def __init__(self, trainer: FsdpTrainer, rollout_id: int, steps: list[StepPlan]) -> None:
        self.trainer, self.rollout_id, self.steps = trainer, rollout_id, list(steps)
        self.settings = trainer.settings
        self.metrics = RunningMetrics()
        compute = trainer.precision.compute
        wide = torch.float64 if compute == torch.float64 else torch.float32
        self.batches: list[list[MicroBatch]] = [
            [
                collate(
                    [step.rows[i] for i in indices],  # type: ignore[misc]
                    [step.sample_num_tokens[i] for i in indices],
                    policy_version=rollout_id if trainer.settings.policy_gradient else None,
                    device=trainer.context.device,
                    dtype=wide,
                )
                for indices in step.micro_batches
            ]
            for step in steps
        ]

    def run(self) -> dict[str, float]:
        """Take all optimizer steps, the critic's first; return the metrics."""
        everything = [batch for step in self.batches for batch in step]
        critic = self.trainer.critic
        policy_learns = critic is None or self.rollout_id >= self.settings.num_critic_only_steps
        if policy_learns and self._needs_old_log_probs():
            self._set_old_log_probs(everything)
        if policy_learns and self.settings.needs_reference:
            with self.trainer.reference_model() as reference:
                for batch in everything:
                    batch.ref_log_probs = self._log_probs_without_grad(reference, batch)
        if critic is not None:
            critic.predict(everything)
        if self.settings.policy_gradient:
            set_advantages(everything, self.settings, self.trainer.all_reduce_sum)
        if policy_learns and self.settings.use_opd:
            self._distill(everything)
        if critic is not None:
            critic.train(self.steps, self.batches, self.metrics, f"rollout {self.rollout_id}")
        mismatch: dict[str, float] = {}
        if policy_learns:
            mismatch = self._correct()
            for index, (step, batches) in enumerate(zip(self.steps, self.batches, strict=True)):
                self._optimizer_step(index, step, batches)
        reduced = mismatch | self.metrics.reduce(self.trainer.all_reduce_sum, len(self.steps))
        return {f"train/{key}": value for key, value in reduced.items()}

    def _needs_old_log_probs(self) -> bool:
        """With a single step on fresh data, the old policy is the current one and needs no pass of its own.

        Every rank answers the same, since the passes contain collectives.
        """
        s = self.settings
        if not s.policy_gradient:
            return False
        if s.kl_coef > 0 or s.use_opd or s.corrects_rollouts or s.get_mismatch_metrics:
            return True
        if s.loss_type == "score_centering":
            return False  # its weights are against the sampler
        return len(self.steps) > 1 and not s.use_rollout_logprobs

    @torch.no_grad()
    def _set_old_log_probs(self, batches: list[MicroBatch]) -> None:
        s, teacher = self.settings, self.trainer.teacher
        for batch in batches:
            logits = self._logits(self.trainer.model, batch)
            batch.old_log_probs = self._policy_log_probs(logits, batch).log_probs
            self._compare_with_rollout(batch, batch.old_log_probs)
            if s.use_opd:
                teacher_logits = None if teacher is None else self._logits(teacher, batch)
                batch.reverse_kl = reverse_kl(batch, logits, teacher_logits, s)

    def _distill(self, batches: list[MicroBatch]) -> None:
        """Subtract the teacher's signal from the advantages, whitened or not."""
        for batch in batches:
            assert batch.advantages is not None
            assert batch.reverse_kl is not None
            batch.advantages = distill_advantages(
                batch.advantages, batch.reverse_kl, batch.mask, kl_coef=self.settings.opd_kl_coef
            )
            self.metrics.add_mean("opd_reverse_kl", batch.reverse_kl.sum(), (batch.mask != 0).sum())

    def _correct(self) -> dict[str, float]:
        """Weigh and reject tokens where asked for; return what is measured of the mismatch, over all ranks."""
        s, trainer = self.settings, self.trainer
        found = []
        if s.policy_gradient and (s.corrects_rollouts or s.get_mismatch_metrics):
            found.append(rollout_mismatch([batch for step in self.batches for batch in step]))
        if s.corrects_rollouts:
            correct = correction_function(s, s.custom_tis_function, trainer.all_reduce_sum)
            for index, batches in enumerate(self.batches):
                self.steps[index], metrics = correct_step(self.steps[index], batches, correct, trainer.all_reduce_sum)
                found.append(metrics)
        return merge_metrics(found).finish(trainer.all_reduce_sum, trainer.all_reduce_max)

    def _optimizer_step(self, index: int, step: StepPlan, batches: list[MicroBatch]) -> None:
        trainer = self.trainer
        for position, batch in enumerate(batches):
            set_last_micro_batch(trainer.model, position == len(batches) - 1)
            logits = self._logits(trainer.model, batch)
            output = self._token_log_probs(logits, batch)
            if index == 0 and output is not None and batch.old_log_probs is None:
                self._compare_with_rollout(batch, output.log_probs)
            result = compute_loss(
                batch,
                logits,
                output,
                self.settings,
                global_num_samples=step.global_num_samples,
                global_num_tokens=step.global_num_tokens,
            )
            result.loss.backward()
            for key, value in result.metrics.items():
                self.metrics.add_part(key, value)
        trainer.optimizer_step(self.metrics, f"optimizer step {index} of rollout {self.rollout_id}")

    def _logits(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return response_logits(
            model,
            batch.tokens,
            batch.response_lengths,
            attn_implementation=self.trainer.attn_implementation,
            device=self.trainer.context.device,
        )

    def _token_log_probs(self, logits: Tensor, batch: MicroBatch) -> TokenLogProbs | None:
        s = self.settings
        if s.loss_type == "custom_loss":
            return None
        output = self._policy_log_probs(logits, batch, bool(s.entropy_coef or s.observe_training_entropy))
        if not s.entropy_coef and output.entropy is not None:
            output = output._replace(entropy=output.entropy.detach())
        return output

    def _policy_log_probs(self, logits: Tensor, batch: MicroBatch, with_entropy: bool = False) -> TokenLogProbs:
        """Of the response tokens, over the tokens that the sampling filters left where there were filters."""
        temperature = self.settings.temperature
        if batch.support_ids is None:
            return log_probs_from_logits(logits, batch.targets, temperature=temperature, with_entropy=with_entropy)
        replayed = support_log_probs(logits, batch.targets, batch.support_ids, temperature=temperature, mask=batch.mask)
        return TokenLogProbs(replayed.log_probs, replayed.entropy if with_entropy else None)

    @torch.no_grad()
    def _log_probs_without_grad(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        logits = self._logits(model, batch)
        return log_probs_from_logits(logits, batch.targets, temperature=self.settings.temperature).log_probs

    def _compare_with_rollout(self, batch: MicroBatch, log_probs: Tensor) -> None:
        """The mean over trainable tokens of |log p_train - log p_rollout|, before the rollout's first step."""
        if not self.settings.policy_gradient:
            return
        comparable = (batch.mask != 0) & batch.has_rollout_log_probs
        difference = log_prob_abs_diff(log_probs, batch.rollout_log_probs, comparable)
        self.metrics.add_mean("train_rollout_logprob_abs_diff", difference.sum(), comparable.sum())
