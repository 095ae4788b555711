"""Typed configuration: frozen dataclasses whose field docstrings are the command line's help. Imports no torch."""

from shared_runtime.config.batch import BatchConfig, resolve_batch, with_num_rollout
from shared_runtime.config.files import flat_args, from_dict, load_config, save_config, to_dict
from shared_runtime.config.groups import (
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
from shared_runtime.config.problems import ConfigError, Problems

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "DebugConfig",
    "FsdpConfig",
    "OptimizerConfig",
    "Problems",
    "RewardPoolConfig",
    "RunConfig",
    "TrackingConfig",
    "flat_args",
    "from_dict",
    "load_config",
    "resolve_batch",
    "save_config",
    "to_dict",
    "with_num_rollout",
]
