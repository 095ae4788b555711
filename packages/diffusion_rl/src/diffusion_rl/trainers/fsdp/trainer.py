"""The FSDP2 trainer of diffusion models: one instance a rank, behind `shared_runtime.training.contract.Trainer`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_rl.algorithms.ema import ema_decay
from diffusion_rl.models.forward import dtype_patterns
from diffusion_rl.models.loading import component_config, model_backend
from diffusion_rl.models.registry import resolve_family
from diffusion_rl.trainers.fsdp.ema import WeightAverage
from diffusion_rl.trainers.fsdp.loading import load_transformer
from diffusion_rl.trainers.fsdp.rollout_pass import RolloutPass
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from diffusion_rl.trainers.fsdp.weights import save_adapters, save_pipeline
from shared_runtime.precision.overrides import param_dtypes
from shared_runtime.precision.policy import PrecisionPolicy, torch_dtype
from shared_runtime.training.fsdp_trainer import FsdpTrainerBase
from shared_runtime.training.lora import adapter_tensors, adapters_disabled, add_adapters, merged_tensors
from shared_runtime.training.lora_files import load_adapters, merge_adapters, read_adapter_config, read_adapters
from shared_runtime.training.plan import StepPlan
from shared_runtime.training.weights import Tensors


class FsdpTrainer(FsdpTrainerBase[FsdpTrainerSettings]):
    """Trains a diffusers transformer under FSDP2, on pairs of a rollout or on pictures (`batch.TrainRow`).

    Args:
        settings: The same on every rank.
        rank: This rank.
        world_size: Number of ranks.
        init_method: Where ranks meet, e.g. `tcp://10.0.0.1:29500`; a single rank needs none.
    """

    ema: WeightAverage | None = None

    def __init__(
        self, settings: FsdpTrainerSettings, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        super().__init__(settings, rank, world_size, init_method)
        self.precision = PrecisionPolicy(
            master=torch_dtype(settings.fsdp_master_dtype),
            compute=torch_dtype(settings.diffusion_forward_dtype),
            reduce=torch_dtype(settings.fsdp_reduce_dtype),
        )
        self.publish_dtype = torch_dtype(settings.publish_dtype or settings.diffusion_forward_dtype)
        self.family = resolve_family(str(settings.hf_checkpoint), settings.diffusion_model_family)
        self.dtype_patterns = dtype_patterns(self.family, settings.param_dtype_patterns)
        self.guidance = self.family.guidance(settings.diffusion_guidance_scale, settings.diffusion_true_cfg_scale)

    def train(self, rollout_id: int, steps: list[StepPlan]) -> dict[str, float]:
        """Take the optimizer steps of one rollout; return metrics, the same on every rank.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
            ValueError: For rows that don't fit; the sample is named.
        """
        self.lease.require_awake("train")
        with warnings.catch_warnings():
            # FSDP warns of outputs that are views, where someone might write into them; nobody does here.
            warnings.filterwarnings("ignore", message=".*returned a view tensor")
            metrics = RolloutPass(self, rollout_id, steps).run()
        if self.ema is not None and not self.settings.debug_skip_optimizer_step:
            decay = self._ema_decay()
            self.ema.update(decay)
            metrics["train/ema_decay"] = decay
        return metrics

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The component's parameters, with LoRA the adapters only; buffers never change."""
        parameters = dict(self.model.named_parameters())
        return adapter_tensors(parameters) if self.settings.use_lora else parameters

    def published_tensors(self) -> Tensors:
        """The component's parameters, adapters merged in; moving averages with `rollout_weights` ema."""
        tensors = self._policy_tensors()
        if not self.settings.use_lora:
            return tensors
        return merged_tensors(tensors, self.settings.lora_alpha / self.settings.lora_rank)

    def _policy_tensors(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        if self.ema is not None and self.settings.rollout_weights == "ema":
            return parameters | self.ema.averages
        return parameters

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[Any]:
        """The reference: a model of its own, or with `ref_mode` lora_base this one without its adapters."""
        if self.settings.ref_mode == "lora_base":
            with adapters_disabled(self.model):
                yield self.model
        else:
            yield self.reference

    def extra_state(self) -> dict[str, Mapping[str, Tensor]]:
        """The moving averages; their decay follows the schedule's step."""
        return {} if self.ema is None else {"ema": self.ema.averages}

    def _build(self) -> None:
        """As the base's; the moving average starts as the weights."""
        super()._build()
        self.own_dtypes = param_dtypes(self.published_tensors(), self.dtype_patterns, self.publish_dtype)
        self.ema = WeightAverage(self.model) if self.settings.use_ema else None

    def sleep(self) -> None:
        """Move model, optimizer and averages to host memory."""
        super().sleep()
        if self.ema is not None and self.lease.moves:
            self.ema.move(torch.device("cpu"))

    def wake_up(self) -> None:
        """Move them back."""
        super().wake_up()
        if self.ema is not None and self.lease.moves:
            self.ema.move(self.context.device)

    def _ema_decay(self) -> float:
        s = self.settings
        return ema_decay(
            self.schedule.last_epoch,
            decay_init=s.ema_decay_init,
            decay_ramp=s.ema_decay_ramp,
            decay_max=s.ema_decay_max,
            flat_steps=s.ema_decay_flat_steps,
        )

    def forward_arguments(self, batch_size: int) -> dict[str, Any]:
        """The transformer's arguments that depend on the picture's size only."""
        s = self.settings
        return self.family.forward_arguments(s.diffusion_height, s.diffusion_width, batch_size, self.vae_scale_factor)

    def save_hf(self, directory: Path) -> None:
        """Write a diffusers directory with the trained component, adapters merged in; a sleeping trainer wakes up.

        With LoRA, `lora/` in it has the adapters alone, for `load_lora_weights` of the original pipeline.
        """
        s = self.settings
        with self.lease.awake():
            save_pipeline(
                self.model,
                self.published_tensors(),
                s.hf_checkpoint,
                s.update_weight_target_module,
                directory,
                self.publish_dtype,
                keep=self.rank == 0,
            )
            if s.use_lora:
                save_adapters(
                    self._policy_tensors(),
                    self.family,
                    s.update_weight_target_module,
                    directory / "lora",
                    rank=s.lora_rank,
                    alpha=s.lora_alpha,
                    target_modules=self.lora_target_modules,
                    keep=self.rank == 0,
                )

    def _load_models(self) -> tuple[nn.Module, nn.Module | None]:
        s = self.settings
        self.vae_scale_factor = self.family.vae_scale_factor(component_config(str(s.hf_checkpoint), "vae"))
        model = self._load(s.hf_checkpoint, trainable=True, adapt=self._add_adapters if s.use_lora else None)
        if s.ref_mode != "ref":
            return model, None
        adapt = self._merge_into_reference if s.ref_lora_adapter_path is not None else None
        return model, self._load(s.ref_load or s.hf_checkpoint, trainable=False, adapt=adapt)

    def _load(self, directory: Path, *, trainable: bool, adapt: Callable[[nn.Module], None] | None) -> nn.Module:
        return load_transformer(
            directory,
            self.family,
            model_backend(self.settings.model_backend),
            self.settings.update_weight_target_module,
            self.context,
            self.precision,
            gradient_checkpointing=self.settings.gradient_checkpointing,
            cpu_offload=self.settings.fsdp_cpu_offload,
            trainable=trainable,
            param_dtype_patterns=self.dtype_patterns,
            adapt=adapt,
        )

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Ends of the names of adapted layers."""
        return self.settings.lora_target_modules or self.family.lora_target_modules

    def _add_adapters(self, model: nn.Module) -> None:
        s = self.settings
        add_adapters(
            model,
            rank=s.lora_rank,
            alpha=s.lora_alpha,
            target_modules=self.lora_target_modules,
            init_weights=s.lora_init_weights,
            seed=s.seed,
        )
        if s.lora_adapter_path is not None and self.rank == 0:  # the other ranks get their shards from rank 0
            stored = read_adapters(s.lora_adapter_path, component=s.update_weight_target_module)
            load_adapters(model, stored, f"--lora-adapter-path {s.lora_adapter_path}")

    def _merge_into_reference(self, model: nn.Module) -> None:
        directory, component = self.settings.ref_lora_adapter_path, self.settings.update_weight_target_module
        assert directory is not None
        if self.rank == 0:
            flag = "--ref-lora-adapter-path"
            scaling = read_adapter_config(directory, flag, component=component).scaling
            merge_adapters(model, read_adapters(directory, component=component), scaling, f"{flag} {directory}")
