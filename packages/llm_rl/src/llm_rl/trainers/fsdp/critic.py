"""PPO's critic: a value model beside the policy, on the same devices, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llm_rl.algorithms.reduction import masked_sum
from llm_rl.algorithms.value_loss import explained_variance, value_loss
from llm_rl.trainers.fsdp.batch import MicroBatch
from llm_rl.trainers.fsdp.forward import response_values
from llm_rl.trainers.fsdp.loss import loss_weights
from shared_runtime.training.fsdp import set_last_micro_batch
from shared_runtime.training.learner import Learner
from shared_runtime.training.metrics import RunningMetrics
from shared_runtime.training.plan import StepPlan
from shared_runtime.training.state import load_state, save_state
from shared_runtime.training.weights import model_tensors

if TYPE_CHECKING:
    from llm_rl.trainers.fsdp.trainer import FsdpTrainer

SUBDIRECTORY = "critic"
"""Where the critic's part of a checkpoint lies: complete with the policy's or not at all."""


class Critic:
    """Predicts the return of a response from each of its tokens on.

    It starts from `critic_load` or the policy's own weights, with a scalar head in place of the language model's. The
    head reads the position *before* a token, so a value says what to expect of the prompt and the tokens so far.

    Args:
        trainer: The rank's trainer.
    """

    def __init__(self, trainer: FsdpTrainer) -> None:
        self.trainer, s = trainer, trainer.settings
        self.model = trainer.load_model(s.critic_load or s.hf_checkpoint, value_head=True)
        shard_mesh = trainer.context.mesh["dp_shard"]
        self.learner = Learner(self.model, s, shard_mesh, lr=s.critic_lr, warmup_steps=s.critic_lr_warmup_iters)

    @torch.no_grad()
    def predict(self, batches: Sequence[MicroBatch]) -> None:
        """Set the values of the micro-batches."""
        for batch in batches:
            batch.values = self._values(batch)

    def train(
        self, steps: Sequence[StepPlan], batches: Sequence[Sequence[MicroBatch]], metrics: RunningMetrics, name: str
    ) -> None:
        """Take the critic's optimizer steps of one rollout, towards the returns of its micro-batches.

        Args:
            steps: This rank's share.
            batches: Micro-batches of each step, with values and returns.
            metrics: Gets the loss, how much of it was clipped, gradient norm, learning rate, and how much of the
                returns' variance the predictions before the first step explain.
            name: Of the rollout, for messages.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
        """
        metrics.add_constant("value_explained_variance", self._explained_variance(batches))
        for index, (step, parts) in enumerate(zip(steps, batches, strict=True)):
            for position, batch in enumerate(parts):
                set_last_micro_batch(self.model, position == len(parts) - 1)
                assert batch.values is not None
                assert batch.returns is not None
                weights = loss_weights(batch, self.trainer.settings, step.global_num_samples, step.global_num_tokens)
                per_token = value_loss(
                    self._values(batch),
                    batch.values,
                    batch.returns,
                    batch.mask,
                    value_clip=self.trainer.settings.value_clip,
                )
                loss = masked_sum(per_token.loss, weights)
                loss.backward()
                metrics.add_part("value_loss", loss)
                metrics.add_part("value_clipfrac", masked_sum(per_token.clipped, weights))
            norm, rate = self.learner.step(f"critic's optimizer step {index} of {name}")
            metrics.add_constant("critic_grad_norm", norm)
            metrics.add_constant("critic_lr", rate)

    def save(self, directory: Path) -> None:
        """Write this rank's shards of weights, optimizer and schedule below a checkpoint's directory."""
        part = directory / SUBDIRECTORY
        part.mkdir(exist_ok=True)
        save_state(model_tensors(self.model), self.model, self.learner.optimizer, self.learner.schedule, part)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, at any number of ranks."""
        part = directory / SUBDIRECTORY
        load_state(model_tensors(self.model), self.model, self.learner.optimizer, self.learner.schedule, part)

    def _values(self, batch: MicroBatch) -> Tensor:
        """(T,), not divided by the rollout's temperature."""
        values = response_values(
            self.model,
            batch.tokens,
            batch.response_lengths,
            attn_implementation=self.trainer.attn_implementation,
            device=self.trainer.context.device,
        )
        return values.to(batch.mask.dtype)

    def _explained_variance(self, batches: Sequence[Sequence[MicroBatch]]) -> float:
        everything = [batch for parts in batches for batch in parts]
        values = torch.cat([batch.values for batch in everything if batch.values is not None])
        returns = torch.cat([batch.returns for batch in everything if batch.returns is not None])
        mask = torch.cat([batch.mask for batch in everything])
        return float(explained_variance(values, returns, mask, self.trainer.all_reduce_sum))
