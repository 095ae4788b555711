"""The FSDP2 trainer of language models: one instance a rank, behind `shared_runtime.training.contract.Trainer`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llm_rl.models.lora_targets import lora_targets
from llm_rl.trainers.fsdp.critic import Critic
from llm_rl.trainers.fsdp.loading import choose_attention, load_model
from llm_rl.trainers.fsdp.rollout_pass import RolloutPass
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.weights import save_adapters, save_hf
from shared_runtime.precision.policy import PrecisionPolicy, torch_dtype
from shared_runtime.training.fsdp_trainer import FsdpTrainerBase
from shared_runtime.training.lora import adapter_tensors, adapters_disabled, add_adapters, merged_tensors
from shared_runtime.training.lora_files import load_adapters, read_adapters
from shared_runtime.training.plan import StepPlan
from shared_runtime.training.weights import Tensors, model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FsdpTrainer(FsdpTrainerBase[FsdpTrainerSettings]):
    """Trains a Hugging Face causal language model under FSDP2.

    Weight versions count the rollouts trained, so the weights that train rollout `i` have version `i`; rows with
    another version are treated as stale (see `loss.old_log_probs`).

    Args:
        settings: The same on every rank.
        rank: This rank.
        world_size: Number of ranks.
        init_method: Where ranks meet, e.g. `tcp://10.0.0.1:29500`; a single rank needs none.
    """

    model: PreTrainedModel
    reference: PreTrainedModel | None
    teacher: PreTrainedModel | None
    critic: Critic | None
    lora_layers: list[str]

    def __init__(
        self, settings: FsdpTrainerSettings, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        super().__init__(settings, rank, world_size, init_method)
        self.precision = PrecisionPolicy.of(settings.train_dtype, keep_fp32_master=settings.keep_fp32_master)
        self.publish_dtype = torch_dtype(settings.publish_dtype or settings.train_dtype)

    def _build(self) -> None:
        """As the base's; teacher and critic, where there are any, come last."""
        super()._build()
        teacher = self.settings.opd_teacher_load
        self.teacher = None if teacher is None else self.load_model(teacher, trainable=False)
        if self.teacher is not None:
            self.lease.add(self.teacher)
        self.critic = Critic(self) if self.settings.use_critic else None
        if self.critic is not None:
            self.lease.add(self.critic.model, self.critic.learner.optimizer)

    def train(self, rollout_id: int, steps: list[StepPlan]) -> dict[str, float]:
        """Take the optimizer steps of one rollout; return metrics, the same on every rank.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
            ValueError: For rows that don't fit; the sample is named.
        """
        self.lease.require_awake("train")
        metrics = RolloutPass(self, rollout_id, steps).run()
        interval = self.settings.ref_update_interval
        if interval is not None and (rollout_id + 1) % interval == 0:
            self._renew_reference()
        return metrics

    @torch.no_grad()
    def _renew_reference(self) -> None:
        new = model_tensors(self.model)
        for name, old in self._reference_tensors().items():
            old.copy_(new[name])

    def _reference_tensors(self) -> dict[str, Tensor]:
        """The reference's shards."""
        assert self.reference is not None
        cast(FSDPModule, self.reference).reshard()  # a backward pass would have done that
        return model_tensors(self.reference)

    def extra_state(self) -> dict[str, Mapping[str, Tensor]]:
        """A reference that does not stay as it was loaded."""
        return {} if self.settings.ref_update_interval is None else {"reference": self._reference_tensors()}

    def checkpoint_tensors(self) -> Mapping[str, Tensor]:
        """The weights as they train, with LoRA the adapters only; the rest never changes."""
        tensors = super().checkpoint_tensors()
        return adapter_tensors(tensors) if self.settings.use_lora else tensors

    def published_tensors(self) -> Tensors:
        """The model's weights, adapters merged in."""
        tensors = model_tensors(self.model)
        s = self.settings
        return merged_tensors(tensors, s.lora_alpha / s.lora_rank) if s.use_lora else tensors

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[PreTrainedModel]:
        """The frozen reference: a model of its own, or with LoRA and no `ref_load` this one without its adapters."""
        if self.reference is not None:
            yield self.reference
        else:
            with adapters_disabled(self.model):
                yield self.model

    def save(self, directory: Path) -> None:
        """Write this rank's part of a sharded checkpoint, the critic's included."""
        super().save(directory)
        if self.critic is not None:
            self.critic.save(directory)

    def load(self, directory: Path) -> None:
        """Read a checkpoint that `save` wrote at any number of ranks."""
        super().load(directory)
        if self.critic is not None:
            self.critic.load(directory)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory in the published dtype; a sleeping trainer wakes up for it.

        With LoRA its weights have the adapters merged in, and `lora/` in it has the adapters alone, for PEFT.
        """
        s, keep = self.settings, self.rank == 0
        with self.lease.awake():
            tensors = self.published_tensors()
            save_hf(self.model, tensors, s.hf_checkpoint, directory, self.publish_dtype, keep=keep)
            if s.use_lora:
                save_adapters(
                    model_tensors(self.model),
                    directory / "lora",
                    base=s.hf_checkpoint,
                    rank=s.lora_rank,
                    alpha=s.lora_alpha,
                    target_modules=self.lora_layers,
                    keep=keep,
                )

    def _load_models(self) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        s = self.settings
        self.attn_implementation = choose_attention(s.attn_implementation, self.context.device)
        model = self.load_model(s.hf_checkpoint, adapt=self._add_adapters if s.use_lora else None)
        own_reference = s.needs_reference and (s.ref_load is not None or not s.use_lora)
        return model, self.load_model(s.ref_load or s.hf_checkpoint, trainable=False) if own_reference else None

    def _add_adapters(self, model: PreTrainedModel) -> None:
        s = self.settings
        self.lora_layers = lora_targets(model, s.target_modules, s.exclude_modules)
        add_adapters(
            model,
            rank=s.lora_rank,
            alpha=s.lora_alpha,
            target_modules=self.lora_layers,
            init_weights="kaiming-uniform",
            seed=s.seed,
        )
        if s.lora_adapter_path is not None and self.rank == 0:  # the other ranks get their shards from rank 0
            load_adapters(model, read_adapters(s.lora_adapter_path), f"--lora-adapter-path {s.lora_adapter_path}")

    def load_model(
        self,
        directory: Path,
        *,
        trainable: bool = True,
        value_head: bool = False,
        adapt: Callable[[PreTrainedModel], None] | None = None,
    ) -> PreTrainedModel:
        """A model as this trainer holds all of its models: sharded, in its dtypes, with its attention."""
        return load_model(
            directory,
            self.context,
            self.precision,
            attn_implementation=self.attn_implementation,
            gradient_checkpointing=trainable and self.settings.gradient_checkpointing,
            cpu_offload=self.settings.fsdp_cpu_offload,
            trainable=trainable,
            value_head=value_head,
            adapt=adapt,
        )
