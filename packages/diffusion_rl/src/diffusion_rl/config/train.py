"""The groups of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from diffusion_rl.config.algorithm import AlgorithmConfig
from diffusion_rl.config.hooks import HooksConfig
from diffusion_rl.config.lora import LoraConfig
from diffusion_rl.config.model import DiffusionFsdpConfig, ModelConfig
from diffusion_rl.config.reward_options import RewardOptionsConfig
from diffusion_rl.config.rollout import DiffusionBatchConfig, EvalConfig, MediaConfig, RewardConfig, SamplingConfig
from shared_runtime.config import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    OptimizerConfig,
    RewardPoolConfig,
    RunConfig,
    TrackingConfig,
    flat_args,
)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: DiffusionBatchConfig = field(default_factory=DiffusionBatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_options: RewardOptionsConfig = field(default_factory=RewardOptionsConfig)
    reward_pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(weight_decay=0.0, adam_beta2=0.999))
    fsdp: DiffusionFsdpConfig = field(default_factory=DiffusionFsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node


def hook_args(config: TrainConfig) -> SimpleNamespace:
    """All settings in one flat namespace, lists of steps as numbers: what hooks and step strategies receive."""
    args = flat_args(config)
    args.diffusion_sde_window_range = numbers(config.sampling.diffusion_sde_window_range)
    args.diffusion_sde_candidate_steps = numbers(config.sampling.diffusion_sde_candidate_steps)
    return args


def numbers(text: str | None) -> tuple[int, ...] | None:
    """`"1,2,3"` as numbers.

    Raises:
        ValueError: If it isn't a list of whole numbers.
    """
    return None if text is None else tuple(int(part) for part in text.split(","))
