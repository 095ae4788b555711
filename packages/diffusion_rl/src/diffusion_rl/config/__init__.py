"""Everything a diffusion run can be told, as typed groups. What stands here is the help text. Imports no torch."""

from diffusion_rl.config.algorithm import AlgorithmConfig
from diffusion_rl.config.checks import resolve
from diffusion_rl.config.hooks import HooksConfig
from diffusion_rl.config.lora import LoraConfig
from diffusion_rl.config.model import DiffusionFsdpConfig, ModelConfig
from diffusion_rl.config.reward_options import RewardOptionsConfig
from diffusion_rl.config.rollout import DiffusionBatchConfig, EvalConfig, MediaConfig, RewardConfig, SamplingConfig
from diffusion_rl.config.train import TrainConfig, hook_args, numbers

__all__ = [
    "AlgorithmConfig",
    "DiffusionBatchConfig",
    "DiffusionFsdpConfig",
    "EvalConfig",
    "HooksConfig",
    "LoraConfig",
    "MediaConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardOptionsConfig",
    "SamplingConfig",
    "TrainConfig",
    "hook_args",
    "numbers",
    "resolve",
]
