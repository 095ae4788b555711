"""What happens to one rollout on one rank: reference means, optimizer steps, and how far trainer and engine differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffusion_rl.models.forward import predict_velocity
from diffusion_rl.trainers.fsdp.batch import PairBatch, PictureBatch, collate_pairs, collate_pictures
from diffusion_rl.trainers.fsdp.loss import LossOutput, output_differences, policy_loss, sft_loss, step_of
from shared_runtime.training.fsdp import set_last_micro_batch
from shared_runtime.training.metrics import RunningMetrics
from shared_runtime.training.plan import StepPlan

if TYPE_CHECKING:
    from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer

# The scheduler's timesteps are its noise levels times this.
TIMESTEPS_A_SIGMA = 1000.0


class RolloutPass:
    """Trains one rollout.

    Args:
        trainer: The rank's trainer.
        rollout_id: Which rollout.
        steps: This rank's share.
    """

    def __init__(self, trainer: FsdpTrainer, rollout_id: int, steps: list[StepPlan]) -> None:
        self.trainer, self.rollout_id, self.steps = trainer, rollout_id, steps
        self.settings = trainer.settings
        self.metrics = RunningMetrics()

    def run(self) -> dict[str, float]:
        """Take all optimizer steps; return the metrics."""
        for index, step in enumerate(self.steps):
            self._optimizer_step(index, step)
        reduced = self.metrics.reduce(self.trainer.all_reduce_sum, len(self.steps), self.trainer.all_reduce_max)
        return {f"train/{key}": value for key, value in reduced.items()}

    def _optimizer_step(self, index: int, step: StepPlan) -> None:
        trainer = self.trainer
        frozen = self.settings.debug_skip_optimizer_step
        for position, indices in enumerate(step.micro_batches):
            set_last_micro_batch(trainer.model, position == len(step.micro_batches) - 1)
            rows: list[Any] = [step.rows[i] for i in indices]
            with torch.set_grad_enabled(not frozen):
                result = self._loss(rows, step.global_num_tokens, first=index == 0)
            if not frozen:
                result.loss.backward()
            for key, value in result.metrics.items():
                self.metrics.add_part(key, value)
        if frozen:
            trainer.model.reshard()  # a backward pass would have done that
        else:
            trainer.optimizer_step(self.metrics, f"optimizer step {index} of rollout {self.rollout_id}")

    def _loss(self, rows: list[Any], global_pairs: int, *, first: bool) -> LossOutput:
        trainer, settings = self.trainer, self.settings
        if settings.loss_type == "sft_loss":
            pictures = collate_pictures(
                rows, trainer.family, trainer.context.device, flow_shift=settings.fsdp_flow_shift
            )
            return sft_loss(pictures, self._velocity_of_pictures(pictures), global_pairs=global_pairs)
        batch = collate_pairs(rows, trainer.family, trainer.context.device)
        if trainer.reference is not None:
            with torch.no_grad():
                batch.ref_means = step_of(batch, self._velocity(trainer.reference, batch), settings).mean
        velocity = self._velocity(trainer.model, batch)
        result = policy_loss(batch, velocity, settings, global_pairs=global_pairs)
        if first:
            self._compare_with_rollout(batch, velocity, result)
        return result

    def _velocity(self, model: Any, batch: PairBatch) -> Tensor:
        trainer = self.trainer
        return predict_velocity(
            trainer.family,
            model,
            batch.latents,
            batch.timesteps,
            batch.conditions,
            batch.negative_conditions,
            trainer.guidance,
            extra=trainer.forward_arguments(len(batch)),
            forward_dtype=trainer.precision.compute,
        )

    def _velocity_of_pictures(self, batch: PictureBatch) -> Tensor:
        """Without guidance: supervised training fits the conditional velocity."""
        trainer = self.trainer
        return predict_velocity(
            trainer.family,
            trainer.model,
            batch.noisy,
            batch.sigma * TIMESTEPS_A_SIGMA,
            batch.conditions,
            None,
            trainer.family.guidance(1.0),
            extra=trainer.forward_arguments(len(batch.sigma)),
            forward_dtype=trainer.precision.compute,
        )

    def _compare_with_rollout(self, batch: PairBatch, velocity: Tensor, result: LossOutput) -> None:
        """How far this forward is from the engine's, before the rollout's first optimizer step."""
        assert result.log_probs is not None
        difference = (result.log_probs - batch.log_probs).abs()
        self.metrics.add_mean("log_prob_mean_abs_diff", (difference * batch.trained).sum(), batch.trained.sum())
        if batch.model_outputs is not None:
            total, largest, relative = output_differences(velocity, batch.model_outputs)
            count = torch.tensor(float(velocity.numel()))
            self.metrics.add_mean("model_output_mean_abs_diff", total, count.to(total.device))
            self.metrics.add_max("model_output_max_abs_diff", largest)
            self.metrics.add_max("model_output_rel_max", relative)
