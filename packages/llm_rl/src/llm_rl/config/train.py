"""The whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_rl.config.algorithm import AlgorithmConfig, PreferenceConfig
from llm_rl.config.correction import CorrectionConfig
from llm_rl.config.hooks import HooksConfig
from llm_rl.config.lora import LoraConfig
from llm_rl.config.model import ModelConfig
from llm_rl.config.roles import CriticConfig, DistillationConfig
from llm_rl.config.rollout import EvalConfig, RewardConfig, SamplingConfig
from llm_rl.config.score_centering import ScoreCenteringConfig
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    FsdpConfig,
    OptimizerConfig,
    RewardPoolConfig,
    RunConfig,
    TrackingConfig,
)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    score_centering: ScoreCenteringConfig = field(default_factory=ScoreCenteringConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def supervised(self) -> bool:
        """Whether responses are given, not drawn."""
        return self.algorithm.loss_type in ("sft_loss", "dpo_loss")

    @property
    def replays_support(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, which training has to know."""
        filtered = self.sampling.rollout_top_p < 1 or self.sampling.rollout_top_k > 0
        return filtered and not self.supervised
