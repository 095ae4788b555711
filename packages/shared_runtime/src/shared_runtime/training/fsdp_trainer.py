"""What the FSDP2 trainers of both domains do alike: ranks, optimizer, published weights, checkpoints, sleep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared_runtime.checkpoint.rng import load_rng, save_rng
from shared_runtime.precision.determinism import seed_everything, use_deterministic_kernels
from shared_runtime.precision.policy import PrecisionPolicy
from shared_runtime.training import weights
from shared_runtime.training.contract import TrainerInfo
from shared_runtime.training.distributed import RankContext, start_rank, stop_rank
from shared_runtime.training.fsdp import count_parameters
from shared_runtime.training.learner import Learner
from shared_runtime.training.metrics import RunningMetrics
from shared_runtime.training.settings import FsdpSettings
from shared_runtime.training.sleep import DeviceLease
from shared_runtime.training.state import load_state, save_state
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta

Settings = TypeVar("Settings", bound=FsdpSettings)


class FsdpTrainerBase(Generic[Settings]):
    """Base of the domains' FSDP trainers; a :class:`~shared_runtime.training.contract.Trainer` without `train`.

    A subclass loads its models in :meth:`_load_models`, says what it publishes in :meth:`published_tensors`, and adds
    `train` and `save_hf`.

    Args:
        settings: The same on every rank.
        rank: This rank.
        world_size: Number of ranks.
        init_method: Where ranks meet, e.g. `tcp://10.0.0.1:29500`; a single rank needs none.
    """

    context: RankContext
    model: Any
    reference: Any
    learner: Learner
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    lease: DeviceLease
    precision: PrecisionPolicy
    publish_dtype: torch.dtype
    own_dtypes: Mapping[str, torch.dtype] = {}
    _joined = False

    def __init__(self, settings: Settings, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        settings.check()
        self.settings = settings
        self.rank, self.world_size, self.init_method = rank, world_size, init_method

    def _load_models(self) -> tuple[nn.Module, nn.Module | None]:
        """The sharded model that trains, and the frozen reference where there is one."""
        raise NotImplementedError

    def published_tensors(self) -> weights.Tensors:
        """What engines get, by published name."""
        return self.checkpoint_tensors()

    def checkpoint_tensors(self) -> Mapping[str, Tensor]:
        """The weights as they train, by name."""
        return weights.model_tensors(self.model)

    def extra_state(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors that a checkpoint holds besides weights, optimizer and schedule, by group and name."""
        return {}

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
        self._joined = True
        try:
            self._build()
        except BaseException:
            self.shutdown()
            raise
        return TrainerInfo(
            rank=self.rank,
            world_size=self.world_size,
            dp_rank=self.rank,
            dp_size=self.world_size,
            num_parameters=count_parameters(self.model),
        )

    def _build(self) -> None:
        """Everything that this rank holds; the process group is there."""
        self.model, self.reference = self._load_models()
        self.learner = Learner(self.model, self.settings, self.context.mesh["dp_shard"])
        self.optimizer, self.schedule = self.learner.optimizer, self.learner.schedule
        models = [self.model] + ([self.reference] if self.reference is not None else [])
        offloaded = self.settings.fsdp_cpu_offload
        self.lease = DeviceLease(models, [self.optimizer], self.context.device, offloaded=offloaded)

    def optimizer_step(self, metrics: RunningMetrics, name: str) -> None:
        """Clip the accumulated gradient, take the step, advance the schedule.

        Args:
            metrics: Gets `grad_norm` and `lr`.
            name: Of the step, for messages.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
        """
        norm, rate = self.learner.step(name)
        metrics.add_constant("grad_norm", norm)
        metrics.add_constant("lr", rate)

    def weight_metadata(self) -> list[TensorMeta]:
        """Names, shapes and dtypes of the published weights; tied ones once."""
        return weights.weight_metadata(self.published_tensors(), self._dtypes)

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        """Gather the named tensors; rank 0 returns them as one bucket."""
        self.lease.require_awake("export_bucket")
        return weights.export_bucket(self.published_tensors(), names, index, self._dtypes, keep=self.rank == 0)

    def weight_checksums(self) -> dict[str, str] | None:
        """SHA-256 of every published tensor; rank 0 returns it."""
        self.lease.require_awake("weight_checksums")
        return weights.weight_checksums(self.published_tensors(), self._dtypes, keep=self.rank == 0)

    @property
    def _dtypes(self) -> weights.PublishDtypes:
        return weights.PublishDtypes(self.publish_dtype, self.own_dtypes)

    def save(self, directory: Path) -> None:
        """Write this rank's part of a sharded checkpoint: weights, optimizer, schedule, RNG. Works asleep too."""
        save_state(self.checkpoint_tensors(), self.model, self.optimizer, self.schedule, directory, self.extra_state())
        save_rng(directory, self.rank)

    def load(self, directory: Path) -> None:
        """Read a checkpoint that `save` wrote at any number of ranks."""
        self.lease.require_awake("load")
        load_state(self.checkpoint_tensors(), self.model, self.optimizer, self.schedule, directory, self.extra_state())
        load_rng(directory, self.rank)

    def sleep(self) -> None:
        """Move model and optimizer to host memory."""
        self.lease.sleep()

    def wake_up(self) -> None:
        """Move them back."""
        self.lease.wake_up()

    def shutdown(self) -> None:
        """Leave the process group, unless it was left already."""
        if self._joined:
            self._joined = False
            stop_rank(self.context)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The largest of each entry over all ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        moved = tensor.to(self.context.device)
        dist.all_reduce(moved, operation)
        return moved.to(tensor.device)
