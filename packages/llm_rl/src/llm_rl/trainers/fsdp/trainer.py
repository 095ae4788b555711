"""The FSDP2 trainer of language models: one instance a rank, behind `shared_runtime.training.contract.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from llm_rl.trainers.fsdp import weights
from llm_rl.trainers.fsdp.loading import choose_attention, load_model
from llm_rl.trainers.fsdp.rollout_pass import RolloutPass
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.checkpoint.rng import load_rng, save_rng
from shared_runtime.precision.determinism import seed_everything, use_deterministic_kernels
from shared_runtime.precision.policy import PrecisionPolicy, torch_dtype
from shared_runtime.training.contract import TrainerInfo
from shared_runtime.training.distributed import RankContext, start_rank, stop_rank
from shared_runtime.training.fsdp import count_parameters
from shared_runtime.training.optimizer import build_optimizer, build_schedule
from shared_runtime.training.plan import StepPlan
from shared_runtime.training.sleep import DeviceLease
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FsdpTrainer:
    """Trains a Hugging Face causal language model under FSDP2.

    Weight versions count the rollouts trained, so the weights that train rollout `i` have version `i`; rows with
    another version are treated as stale (see `loss.old_log_probs`).

    Args:
        settings: The same on every rank.
        rank: This rank.
        world_size: Number of ranks.
        init_method: Where ranks meet, e.g. `tcp://10.0.0.1:29500`; a single rank needs none.
    """

    context: RankContext
    model: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    lease: DeviceLease

    def __init__(
        self, settings: FsdpTrainerSettings, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        settings.check()
        self.settings = settings
        self.rank, self.world_size, self.init_method = rank, world_size, init_method
        self.precision = PrecisionPolicy.of(settings.train_dtype, keep_fp32_master=settings.keep_fp32_master)
        self.publish_dtype = torch_dtype(settings.publish_dtype or settings.train_dtype)

    def init(self) -> TrainerInfo:
        """Join the other ranks, load and shard the model (and the reference), build optimizer and schedule."""
        s = self.settings
        if s.deterministic_mode:
            use_deterministic_kernels()
        seed_everything(s.seed)
        self.context = start_rank(
            rank=self.rank,
            world_size=self.world_size,
            init_method=self.init_method,
            dp_replicate_size=s.dp_replicate_size,
            device=s.device,
            cpu_backend=s.fsdp_cpu_backend,
        )
        self.attn_implementation = choose_attention(s.attn_implementation, self.context.device)
        self.model = self._load(s.hf_checkpoint, trainable=True)
        self.reference = self._load(s.ref_load or s.hf_checkpoint, trainable=False) if s.needs_reference else None
        self.optimizer = build_optimizer(
            self.model.named_parameters(),
            kind=s.optimizer,
            lr=s.lr,
            weight_decay=s.weight_decay,
            betas=(s.adam_beta1, s.adam_beta2),
            eps=s.adam_eps,
        )
        self.schedule = build_schedule(
            self.optimizer,
            lr=s.lr,
            min_lr=s.min_lr,
            decay_style=s.lr_decay_style,
            warmup_steps=s.lr_warmup_iters,
            decay_steps=s.lr_decay_iters,
        )
        models = [self.model] + ([self.reference] if self.reference is not None else [])
        self.lease = DeviceLease(models, self.optimizer, self.context.device, offloaded=s.fsdp_cpu_offload)
        return TrainerInfo(
            rank=self.rank,
            world_size=self.world_size,
            dp_rank=self.rank,
            dp_size=self.world_size,
            num_parameters=count_parameters(self.model),
        )

    def train(self, rollout_id: int, steps: list[StepPlan]) -> dict[str, float]:
        """Take the optimizer steps of one rollout; return metrics, the same on every rank.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
            ValueError: For rows that don't fit; the sample is named.
        """
        self.lease.require_awake("train")
        return RolloutPass(self, rollout_id, steps).run()

    def weight_metadata(self) -> list[TensorMeta]:
        """Names, shapes and dtypes of the published weights; tied ones once."""
        return weights.weight_metadata(self.model, self.publish_dtype)

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        """Gather the named tensors; rank 0 returns them as one bucket."""
        self.lease.require_awake("export_bucket")
        return weights.export_bucket(self.model, names, index, self.publish_dtype, keep=self.rank == 0)

    def weight_checksums(self) -> dict[str, str] | None:
        """SHA-256 of every published tensor; rank 0 returns it."""
        self.lease.require_awake("weight_checksums")
        return weights.weight_checksums(self.model, self.publish_dtype, keep=self.rank == 0)

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory in the published dtype; a sleeping trainer wakes up for it."""
        with self.lease.awake():
            weights.save_hf(self.model, self.settings.hf_checkpoint, directory, self.publish_dtype, keep=self.rank == 0)

    def save(self, directory: Path) -> None:
        """Write this rank's part of a sharded checkpoint: weights, optimizer, schedule, RNG. Works asleep too."""
        from llm_rl.trainers.fsdp.state import save

        save(self.model, self.optimizer, self.schedule, directory)
        save_rng(directory, self.rank)

    def load(self, directory: Path) -> None:
        """Read a checkpoint that `save` wrote at any number of ranks."""
        from llm_rl.trainers.fsdp.state import load

        self.lease.require_awake("load")
        load(self.model, self.optimizer, self.schedule, directory)
        load_rng(directory, self.rank)

    def sleep(self) -> None:
        """Move model and optimizer to host memory."""
        self.lease.sleep()

    def wake_up(self) -> None:
        """Move them back."""
        self.lease.wake_up()

    def shutdown(self) -> None:
        """Leave the process group."""
        stop_rank(self.context)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks."""
        if self.world_size == 1:
            return tensor
        moved = tensor.to(self.context.device)
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def _load(self, directory: Path, *, trainable: bool) -> PreTrainedModel:
        return load_model(
            directory,
            self.context,
            self.precision,
            attn_implementation=self.attn_implementation,
            gradient_checkpointing=trainable and self.settings.gradient_checkpointing,
            cpu_offload=self.settings.fsdp_cpu_offload,
            trainable=trainable,
        )
