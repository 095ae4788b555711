"""The configuration that every run has, language or diffusion, grouped by what it concerns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared_runtime.config.problems import Problems


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how it repeats."""

    runs_dir: Path = Path("runs")
    """Directory that holds one directory a run."""
    run_name: str | None = None
    """Name of the run's directory. Unset: the recipe's name; the same command resumes an unfinished run."""
    seed: int = 1234
    """Seed of the trainer: initialisation and shuffling inside the optimizer's steps."""
    rollout_seed: int = 42
    """Seed of the rollout: prompt order and, with each sample's id, every drawn token."""
    deterministic_mode: bool = False
    """Only deterministic kernels: two runs of one configuration give identical numbers."""
    in_process: bool = False
    """Everything in this process, without Ray: one trainer rank, one local engine."""


@dataclass(frozen=True)
class ClusterConfig:
    """Who runs where. Without a GPU the same layouts are made of CPU workers."""

    actor_num_nodes: int = 1
    """Nodes that train."""
    actor_num_gpus_per_node: int = 1
    """GPUs (without one: CPU workers) that train on each of them."""
    rollout_num_gpus: int | None = None
    """GPUs that generate. Unset: as many as train. Ignored with --colocate."""
    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine."""
    num_gpus_per_node: int = 8
    """GPUs of a machine that engines are placed on."""
    colocate: bool = False
    """Trainer and engines share the GPUs and take turns."""
    offload_train: bool | None = None
    """The trainer leaves the device while the engines generate. Unset: on with --colocate."""
    offload_rollout: bool | None = None
    """The engines leave the device while the trainer trains. Unset: on with --colocate."""
    ray_address: str | None = None
    """Address of a running Ray cluster. Unset: a local one is started and stopped with the run."""

    def check(self, problems: Problems) -> None:
        """Note counts that make no layout."""
        problems.positive(
            actor_num_nodes=self.actor_num_nodes,
            actor_num_gpus_per_node=self.actor_num_gpus_per_node,
            rollout_num_gpus=self.rollout_num_gpus,
            rollout_num_gpus_per_engine=self.rollout_num_gpus_per_engine,
            num_gpus_per_node=self.num_gpus_per_node,
        )


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    prompt_data: str | None = None
    """JSONL or parquet file of prompts; `file.jsonl@[a:b]` takes rows a to b."""
    input_key: str = "input"
    """Key of the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Key of the label that the reward compares with."""
    metadata_key: str = "metadata"
    """Key of a row's metadata object."""
    rollout_shuffle: bool = False
    """Shuffle the prompts, anew each epoch."""
    data_source_path: str | None = None
    """`package.module.Class` that replaces the data source."""


@dataclass(frozen=True)
class RewardPoolConfig:
    """Ray workers that score, besides those that train and generate."""

    reward_num_workers: int = 0
    """Workers that score with --rm-type. 0: threads of the run's own process."""
    reward_num_cpus_per_worker: float = 1.0
    """CPUs of each."""
    reward_num_gpus_per_worker: float = 0.0
    """GPUs of each, or a part of one; outside of those that train and generate."""
    reward_batch_size: int = 8
    """Samples sent to a worker at once."""
    reward_colocate: bool = False
    """Seat the workers on the GPUs that train and generate, one a GPU. Needs --colocate."""

    def check(self, problems: Problems, cluster: ClusterConfig, *, in_process: bool, rm_type: str | None) -> None:
        """Note a pool that has no place, or nothing to score with: `rm_type` is that of the built-in reward, if any."""
        problems.positive(reward_batch_size=self.reward_batch_size)
        problems.not_negative(
            reward_num_workers=self.reward_num_workers,
            reward_num_cpus_per_worker=self.reward_num_cpus_per_worker,
            reward_num_gpus_per_worker=self.reward_num_gpus_per_worker,
        )
        workers = self.reward_num_workers
        if workers == 0:
            problems.require(not self.reward_colocate, "--reward-colocate needs --reward-num-workers")
            return
        problems.require(not in_process, "--reward-num-workers are Ray workers, and --in-process has none")
        problems.require(
            rm_type is not None,
            "--reward-num-workers score with --rm-type: a --custom-rm-path runs in the run's own process",
        )
        problems.require(cluster.colocate or not self.reward_colocate, "--reward-colocate needs --colocate")
        if self.reward_colocate and workers > cluster.actor_num_gpus_per_node:
            problems.add(
                f"--reward-colocate seats one worker a GPU of the first node: --reward-num-workers {workers} are more "
                f"than --actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or plain SGD."""
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Where a decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_iters: int | None = None
    """Optimizer steps until the decay ends. Unset: the whole run."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases are left out."""
    adam_beta1: float = 0.9
    """First moment's decay."""
    adam_beta2: float = 0.98
    """Second moment's decay."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""

    def check(self, problems: Problems) -> None:
        """Note values that no optimizer takes."""
        problems.positive(adam_eps=self.adam_eps, lr_decay_iters=self.lr_decay_iters)
        problems.not_negative(
            lr=self.lr,
            min_lr=self.min_lr,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            lr_warmup_iters=self.lr_warmup_iters,
        )
        for name, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            problems.require(0 <= beta < 1, f"{name} must be in [0, 1), got {beta}")
        problems.require(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}")

    def check_decay(
        self,
        problems: Problems,
        *,
        total_steps: int,
        warmup_steps: int | None = None,
        warmup: str = "--lr-warmup-iters",
    ) -> None:
        """Note a decay that would be over before it begins.

        Args:
            problems: Gets it.
            total_steps: Optimizer steps of the whole run, where a decay ends unless told otherwise.
            warmup_steps: Of a model with a warm-up of its own. Unset: `lr_warmup_iters`.
            warmup: The flag that sets them.
        """
        start = self.lr_warmup_iters if warmup_steps is None else warmup_steps
        end = self.lr_decay_iters or total_steps
        if self.lr_decay_style == "constant" or not end <= start <= total_steps:
            return
        where = "--lr-decay-iters" if self.lr_decay_iters else "the run's optimizer steps:"
        problems.add(
            f"--lr-decay-style {self.lr_decay_style} falls from the end of {warmup} {start} to {where} {end}, which is "
            "no later: set --lr-decay-iters above, or the warm-up below"
        )


@dataclass(frozen=True)
class FsdpConfig:
    """The FSDP2 trainer."""

    dp_replicate_size: int = 1
    """Replicas of the sharded model (hybrid sharding); must divide the number of trainer ranks."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; the optimizer step runs there."""
    fsdp_cpu_backend: str = "gloo"
    """Process-group backend for CPU tensors."""
    train_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of forward and backward."""
    keep_fp32_master: bool = True
    """Keep the weights and optimizer state in fp32 whatever the compute dtype."""
    attn_implementation: str | None = None
    """Attention of `transformers`. Unset: flash_attention_2 on a GPU, packed SDPA on the CPU."""

    def check(self, problems: Problems, world_size: int) -> None:
        """Note a mesh that does not divide the ranks."""
        problems.positive(dp_replicate_size=self.dp_replicate_size)
        if self.dp_replicate_size > 0 and world_size % self.dp_replicate_size:
            problems.add(f"--dp-replicate-size {self.dp_replicate_size} does not divide the {world_size} trainer ranks")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and from where a run goes on."""

    save: Path | None = None
    """Directory of the checkpoints. Unset: `checkpoints` in the run's directory."""
    load: Path | None = None
    """Checkpoint directory (the parent, not one `iter_*`) to start from. Unset: the run's own latest, if any."""
    save_interval: int | None = None
    """Rollouts between checkpoints. Unset: only at the end."""
    save_keep_last: int = 2
    """Checkpoints to keep; an old one goes only when the new one is complete."""
    save_trigger_sentinel: Path | None = None
    """If this file exists at a save point, a checkpoint is written and the file removed."""
    save_hf: str | None = "hf"
    """Hugging Face export at the end, below the run's directory; `None` for none."""

    def check(self, problems: Problems) -> None:
        """Note intervals that mean nothing and a `--load` that names one checkpoint instead of their directory."""
        problems.positive(save_interval=self.save_interval, save_keep_last=self.save_keep_last)
        if self.load is not None and self.load.name.startswith("iter_"):
            problems.add(f"--load takes the parent directory: {self.load.parent}, not {self.load}")


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides the run's directory."""

    log_interval: int = 1
    """Rollouts between progress lines."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """Live display, plain lines, or nothing; auto is live on a terminal."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "tandem"
    """Project name."""
    wandb_group: str | None = None
    """Group name."""
    wandb_team: str | None = None
    """Team or user that the project belongs to. Unset: the account's default."""
    wandb_run_id: str | None = None
    """Id of the W&B run. Unset: a new one, which the run's directory keeps."""
    wandb_host: str | None = None
    """Address of a W&B server of your own."""
    wandb_dir: Path | None = None
    """Where W&B keeps its files. Unset: `wandb` in the run's directory."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Offline writes below the run's directory. Unset: `WANDB_MODE`, else online."""
    use_tensorboard: bool = False
    """Log to TensorBoard."""
    tensorboard_dir: Path | None = None
    """TensorBoard directory. Unset: `tensorboard` in the run's directory."""

    def check(self, problems: Problems) -> None:
        """Note an interval that means nothing."""
        problems.positive(log_interval=self.log_interval)


@dataclass(frozen=True)
class DebugConfig:
    """Cutting a run into halves."""

    debug_rollout_only: bool = False
    """Generate and score; no trainer is started."""
    debug_train_only: bool = False
    """Train on recorded rollouts; no engine is started."""
    save_debug_rollout_data: str | None = None
    """Write every rollout to this path, which must contain {rollout_id}."""
    load_debug_rollout_data: str | None = None
    """Train from these recordings; implies --debug-train-only."""

    def check(self, problems: Problems, *, own_rollouts: bool = False) -> None:
        """Note halves that exclude each other and paths that would be written over.

        Args:
            problems: Where they go.
            own_rollouts: Whether what is trained on comes without an engine (supervised data).
        """
        train_only = self.debug_train_only or self.load_debug_rollout_data is not None
        if self.debug_rollout_only and train_only:
            problems.add("--debug-rollout-only and --debug-train-only exclude each other")
        if self.debug_train_only and not own_rollouts and self.load_debug_rollout_data is None:
            problems.add("--debug-train-only needs --load-debug-rollout-data")
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            template = getattr(self, name)
            if template is not None and "{rollout_id}" not in template:
                problems.add(f"--{name.replace('_', '-')} must contain {{rollout_id}}, got {template}")

    @property
    def trains(self) -> bool:
        """Whether the run has trainers."""
        return not self.debug_rollout_only

    @property
    def rolls_out(self) -> bool:
        """Whether the run has engines."""
        return not (self.debug_train_only or self.load_debug_rollout_data)
