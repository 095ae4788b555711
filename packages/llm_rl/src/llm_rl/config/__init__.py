"""Everything a language-model run can be told, as typed groups. What stands here is the help text. Imports no torch."""

from llm_rl.config.algorithm import AdvantageEstimator, AlgorithmConfig, PreferenceConfig
from llm_rl.config.checks import resolve
from llm_rl.config.correction import CorrectionConfig
from llm_rl.config.hooks import HooksConfig
from llm_rl.config.lora import LoraConfig
from llm_rl.config.model import ModelConfig
from llm_rl.config.roles import CriticConfig, DistillationConfig
from llm_rl.config.rollout import EvalConfig, RewardConfig, SamplingConfig
from llm_rl.config.score_centering import ScoreCenteringConfig
from llm_rl.config.train import TrainConfig

__all__ = [
    "AdvantageEstimator",
    "AlgorithmConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DistillationConfig",
    "EvalConfig",
    "HooksConfig",
    "LoraConfig",
    "ModelConfig",
    "PreferenceConfig",
    "RewardConfig",
    "SamplingConfig",
    "ScoreCenteringConfig",
    "TrainConfig",
    "resolve",
]
