"""The diffusion model's side of the training loop: rollout, evaluation, training rows, logs, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusion_rl.config import TrainConfig, hook_args
from diffusion_rl.generation import GenerateState
from diffusion_rl.media import AFTER, BEFORE, logged_images, save_images
from diffusion_rl.preflight import Prepared
from diffusion_rl.rollout import DiffusionRollout, Evaluator
from diffusion_rl.sample import Sample, SamplingParams
from diffusion_rl.scoring import RewardScorer
from diffusion_rl.supervised import SupervisedRollout
from diffusion_rl.train_data import (
    checked_rows,
    plan_pairs,
    rollout_advantages,
    samples_to_noised_rows,
    samples_to_pictures,
    samples_to_rows,
)
from diffusion_rl.trainers.fsdp.batch import TrainRow
from shared_runtime.data.source import RolloutDataSource
from shared_runtime.engines.client import BatchingClient
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.rollout.functions import post_processed_rewards
from shared_runtime.rollout.rollout import RolloutHooks, RolloutSettings
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.tracking.log_hooks import LogHooks
from shared_runtime.tracking.sink import LoggedImage
from shared_runtime.training.plan import StepPlan
from shared_runtime.workers import Workers


class DiffusionDomain:
    """Implements `shared_runtime.domain.Domain` for a prepared run.

    Args:
        prepared: The checked configuration with its prompts and hooks.
        workers: Rollout engines, and scorers if there are.
        media: Directory of the pictures.
    """

    def __init__(self, prepared: Prepared, workers: Workers, media: Path) -> None:
        config, hooks = prepared.config, prepared.hooks
        self.config, self.media = config, media
        self.nft_strategy = prepared.nft_strategy
        self.post_process = hooks.get("--custom-reward-post-process-path")
        self.expand = hooks.get("--custom-expand-samples-to-train-pairs-path")
        self.convert = hooks.get("--custom-convert-samples-to-train-data-path")
        self.args = hook_args(config)
        self.log_hooks = LogHooks(
            hooks.get("--custom-rollout-log-function-path"),
            hooks.get("--custom-eval-rollout-log-function-path"),
            self.args,
        )
        self.source = _data_source(prepared, self.args)
        self.scorer = RewardScorer(
            rm_type=config.reward.rm_type,
            custom=hooks.get("--custom-rm-path"),
            group_rm=config.reward.group_rm,
            args=self.args,
            options=config.reward_options.options(),
            pool=workers.reward_pool,
        )
        client: Any = None
        if workers.engines is not None:
            # An engine batches nothing across requests, so each is a call of its own and is scored when it is there.
            client = BatchingClient(
                workers.engines,
                max_batch_size=1,
                cost=lambda request: request.num_outputs * request.params.num_steps,
            )
        self.state = GenerateState(
            args=self.args,
            client=client,
            params=_sampling(config),
            strategy=prepared.strategy,
            strategy_path=config.sampling.diffusion_step_strategy_path or "",
            microgroup_size=config.batch.rollout_microgroup_size,
            rollout_seed=config.run.rollout_seed,
            generate_function=hooks.get("--custom-generate-function-path"),
        )
        self.roll_out = self._supervised(prepared, workers.engines) or DiffusionRollout(
            source=self.source,
            state=self.state,
            scorer=self.scorer,
            settings=_rollout_settings(config),
            hooks=RolloutHooks.of(hooks),
        )
        evaluation = config.evaluation
        self.evaluator = Evaluator(
            sets=prepared.eval_sets,
            state=self.state,
            scorer=self.scorer,
            num_steps=evaluation.diffusion_eval_num_steps or config.sampling.diffusion_num_steps,
            n_samples_per_eval_prompt=evaluation.n_samples_per_eval_prompt,
            on_reward_error=config.reward.on_reward_error,
            reward_key=config.reward.reward_key,
            eval_function=hooks.get("--eval-function-path"),
        )

    def _supervised(self, prepared: Prepared, engines: WorkerGroup | None) -> SupervisedRollout | None:
        """The rollout of supervised training, where the run is one."""
        if self.config.algorithm.loss_type != "sft_loss" or engines is None or prepared.dataset is None:
            return None
        batch_size = self.config.batch.rollout_batch_size
        assert batch_size is not None
        return SupervisedRollout(self.source, engines, prepared.dataset.path.parent, batch_size)

    async def rollout(self, rollout_id: int) -> RolloutResult[Sample]:
        """Sample and score one batch under weights of version `rollout_id`."""
        self.state.weight_version = rollout_id
        result = await self.roll_out(rollout_id)
        result.metrics |= self.scorer.pop_metrics()
        seconds = result.generate_seconds + result.score_seconds
        samples = [sample for group in result.samples for sample in group]
        if self.log_hooks.rollout(rollout_id, samples, result.metrics, seconds):
            result.metrics = {name: value for name, value in result.metrics.items() if name.startswith("perf/")}
        return result

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the evaluation sets under weights of version `rollout_id + 1`; keep pictures of the first one."""
        self.state.weight_version = rollout_id + 1
        result = await self.evaluator(rollout_id)
        self.scorer.pop_metrics()  # a rollout's are its own
        if result.data:
            first = next(iter(result.data.values()))
            samples = [sample for sample in first["samples"] if isinstance(sample, Sample)]
            if len(samples) == len(first["rewards"]):
                save_images(self.media, BEFORE if rollout_id < 0 else AFTER, samples, first["rewards"])
        if self.log_hooks.evaluation(rollout_id, result.data, result.metrics):
            # The scores themselves stay: `--eval-target` and the summary are decided by them.
            scores = {f"eval/{name}" for name in result.data}
            return {name: value for name, value in result.metrics.items() if name in scores}
        return result.metrics

    def plan(self, rollout_id: int, rollout: RolloutResult[Sample]) -> list[list[StepPlan]]:
        """Pairs with advantages relative to their group, split over steps, ranks and micro-batches."""
        batch = self.config.batch
        pairs = self._rows([sample for group in rollout.samples for sample in group])
        return plan_pairs(
            pairs,
            dp_size=self.config.world_size,
            num_steps=batch.num_steps_per_rollout or 1,
            micro_batch_size=batch.micro_batch_size,
            micro_batch_size_sample=batch.micro_batch_size_sample,
            micro_batch_size_tstep=batch.micro_batch_size_tstep,
        )

    def _rows(self, samples: list[Sample]) -> list[list[TrainRow]]:
        nft = self.config.algorithm.loss_type == "nft"
        if self.convert is not None:
            rows = self.convert(self.args, samples)
            return checked_rows(rows, samples, "--custom-convert-samples-to-train-data-path", noised=nft)
        if self.config.algorithm.loss_type == "sft_loss":
            return samples_to_pictures(samples, seed=self.config.run.seed)
        raw, advantages = self._advantages(samples)
        if self.expand is not None:
            rows = self.expand(self.args, samples, advantages, raw)
            return checked_rows(rows, samples, "--custom-expand-samples-to-train-pairs-path", noised=nft)
        if not nft:
            return samples_to_rows(samples, advantages)
        return samples_to_noised_rows(
            samples,
            advantages,
            self.nft_strategy,
            self.args,
            seed=self.config.run.seed,
            strategy_path=self.config.algorithm.diffusion_nft_timestep_strategy_path or "drop_random_steps",
        )

    def _advantages(self, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards, and what they are worth beside those of their group."""
        algorithm, key = self.config.algorithm, self.config.reward.reward_key
        if self.post_process is not None:
            return post_processed_rewards(self.post_process(self.args, samples), len(samples))
        advantages = rollout_advantages(
            samples,
            reward_key=key,
            std_normalization=not algorithm.disable_grpo_std_normalization,
            globalize_mean=algorithm.globalize_reward_mean,
            globalize_std=algorithm.globalize_reward_std,
            unbiased=not algorithm.population_reward_std,
        )
        return [sample.scalar_reward(key) for sample in samples], advantages

    def sample_rows(self, rollout: RolloutResult[Sample]) -> list[dict[str, Any]]:
        """What `samples.jsonl` keeps of each sample."""
        return [
            {
                "index": sample.index,
                "group_index": sample.group_index,
                "prompt": sample.prompt,
                "seed": sample.seed,
                "label": sample.label,
                "reward": sample.reward,
                "status": sample.status.value,
                "weight_version": sample.weight_version_returned,
            }
            for group in rollout.samples
            for sample in group
        ]

    def sample_images(self, rollout_id: int, rollout: RolloutResult[Sample]) -> list[LoggedImage]:
        """The first images of a rollout, every `--wandb-log-image-interval` rollouts."""
        media = self.config.media
        if media.wandb_log_num_images == 0 or rollout_id % media.wandb_log_image_interval:
            return []
        samples = [sample for group in rollout.samples for sample in group]
        return logged_images(samples[: media.wandb_log_num_images], self.config.reward.reward_key)

    def save(self, directory: Path) -> None:
        """Write the data source's state; everything else derives from ids."""
        self.source.save(directory)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        self.source.load(directory)

    def close(self) -> None:
        """End the scorer's threads."""
        self.scorer.close()


def _data_source(prepared: Prepared, args: Any) -> Any:
    custom = prepared.hooks.get("--data-source-path")
    if custom is not None:
        return custom(args)
    config = prepared.config
    assert prepared.dataset is not None  # a run has one or the other
    return RolloutDataSource(
        prepared.dataset,
        Sample,
        n_samples_per_prompt=config.batch.n_samples_per_prompt or 1,
        shuffle=config.data.rollout_shuffle,
        seed=config.run.rollout_seed,
        buffer_filter=prepared.hooks.get("--buffer-filter-path"),
        args=args,
    )


def _sampling(config: TrainConfig) -> SamplingParams:
    sampling = config.sampling
    return SamplingParams(
        num_steps=sampling.diffusion_num_steps,
        height=sampling.diffusion_height,
        width=sampling.diffusion_width,
        guidance_scale=sampling.diffusion_guidance_scale,
        true_cfg_scale=sampling.diffusion_true_cfg_scale,
        negative_prompt=sampling.diffusion_negative_prompt,
        sde_type=sampling.diffusion_sde_type,
        noise_level=sampling.diffusion_noise_level,
        flow_shift=sampling.diffusion_flow_shift,
        log_prob_no_const=sampling.diffusion_log_prob_no_const,
        debug=sampling.diffusion_debug_mode or config.algorithm.diffusion_grpo_guard,
    )


def _rollout_settings(config: TrainConfig) -> RolloutSettings:
    batch = config.batch
    assert batch.rollout_batch_size is not None
    over = batch.over_sampling_batch_size
    return RolloutSettings(
        rollout_batch_size=batch.rollout_batch_size,
        over_sampling_batch_size=over if over != batch.rollout_batch_size else None,
        on_reward_error=config.reward.on_reward_error,
        reward_key=config.reward.reward_key,
        max_in_flight=config.sampling.rollout_max_in_flight,
    )
