"""What happens to one rollout on one rank: reference means, optimizer steps, and how far trainer and engine differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffusion_rl.models.family import Guidance
from diffusion_rl.models.forward import predict_velocity
from diffusion_rl.trainers.fsdp.batch import PairBatch, PictureBatch, collate_pairs, collate_pictures, prepared_batch
from diffusion_rl.trainers.fsdp.loss import (
    LossOutput,
    custom_loss,
    nft_loss_of,
    output_differences,
    policy_loss,
    sft_loss,
    step_of,
)
from shared_runtime.training.fsdp import set_last_micro_batch
from shared_runtime.training.metrics import RunningMetrics
from shared_runtime.training.plan import StepPlan

if TYPE_CHECKING:
    from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer


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
        old = self._old_velocities() if self.settings.loss_type == "nft" else None
        for index, step in enumerate(self.steps):
            self._optimizer_step(index, step, None if old is None else old[index])
        reduced = self.metrics.reduce(self.trainer.all_reduce_sum, len(self.steps), self.trainer.all_reduce_max)
        return {f"train/{key}": value for key, value in reduced.items()}

    @torch.no_grad()
    def _old_velocities(self) -> list[list[Tensor]]:
        """Of the policy that sampled, which is the moving average, for each step and micro-batch."""
        trainer = self.trainer
        assert trainer.ema is not None
        with trainer.ema.swapped_in():
            return [
                [
                    self._velocity(trainer.model, self._pictures([step.rows[i] for i in indices]))
                    for indices in step.micro_batches
                ]
                for step in self.steps
            ]

    def _optimizer_step(self, index: int, step: StepPlan, old: list[Tensor] | None) -> None:
        trainer = self.trainer
        frozen = self.settings.debug_skip_optimizer_step
        for position, indices in enumerate(step.micro_batches):
            set_last_micro_batch(trainer.model, position == len(step.micro_batches) - 1)
            rows: list[Any] = [step.rows[i] for i in indices]
            with torch.set_grad_enabled(not frozen):
                if old is not None:
                    result = self._nft_loss(rows, step.global_num_tokens, old[position])
                elif self.settings.loss_type == "sft_loss":
                    result = self._sft_loss(rows, step.global_num_tokens)
                else:
                    result = self._policy_loss(rows, step.global_num_tokens, first=index == 0)
            if not frozen:
                result.loss.backward()
            for key, value in result.metrics.items():
                self.metrics.add_part(key, value)
        if frozen:
            trainer.model.reshard()  # a backward pass would have done that
        else:
            trainer.optimizer_step(self.metrics, f"optimizer step {index} of rollout {self.rollout_id}")

    def _pictures(self, rows: list[Any]) -> PictureBatch:
        trainer = self.trainer
        if self.settings.prepare_train_batch is not None:
            return prepared_batch(self.settings, rows, trainer.family, trainer.context.device, PictureBatch)
        return collate_pictures(rows, trainer.family, trainer.context.device, flow_shift=self.settings.fsdp_flow_shift)

    def _pairs(self, rows: list[Any]) -> PairBatch:
        trainer = self.trainer
        if self.settings.prepare_train_batch is not None:
            return prepared_batch(self.settings, rows, trainer.family, trainer.context.device, PairBatch)
        return collate_pairs(rows, trainer.family, trainer.context.device)

    def _sft_loss(self, rows: list[Any], global_pairs: int) -> LossOutput:
        """Without guidance: supervised training fits the conditional velocity."""
        trainer = self.trainer
        batch = self._pictures(rows)
        velocity = self._velocity(trainer.model, batch, trainer.family.guidance(1.0))
        return sft_loss(batch, velocity, global_pairs=global_pairs)

    def _nft_loss(self, rows: list[Any], global_pairs: int, old: Tensor) -> LossOutput:
        trainer = self.trainer
        batch = self._pictures(rows)
        batch.old_velocity = old
        if self.settings.ref_mode != "none":
            with torch.no_grad(), trainer.reference_model() as reference:
                batch.ref_velocity = self._velocity(reference, batch)
        return nft_loss_of(batch, self._velocity(trainer.model, batch), self.settings, global_pairs=global_pairs)

    def _policy_loss(self, rows: list[Any], global_pairs: int, *, first: bool) -> LossOutput:
        trainer, settings = self.trainer, self.settings
        batch = self._pairs(rows)
        if settings.ref_mode != "none":
            with torch.no_grad(), trainer.reference_model() as reference:
                batch.ref_means = step_of(batch, self._velocity(reference, batch), settings).mean
        velocity = self._velocity(trainer.model, batch)
        loss = custom_loss if settings.loss_type == "custom_loss" else policy_loss
        result = loss(batch, velocity, settings, global_pairs=global_pairs)
        if first:
            self._compare_with_rollout(batch, velocity, result)
        return result

    def _velocity(self, model: Any, batch: PairBatch | PictureBatch, guidance: Guidance | None = None) -> Tensor:
        trainer = self.trainer
        return predict_velocity(
            trainer.family,
            model,
            batch.latents if isinstance(batch, PairBatch) else batch.noisy,
            batch.timesteps,
            batch.conditions,
            batch.negative_conditions,
            trainer.guidance if guidance is None else guidance,
            extra=trainer.forward_arguments(len(batch)),
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
