"""The language model's side of the training loop: rollout, evaluation, training rows, logs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from llm_rl.config import TrainConfig
from llm_rl.conversations import ConversationEncoder
from llm_rl.evaluation import Evaluator, eval_sampling
from llm_rl.generation import GenerateState
from llm_rl.preflight import Prepared
from llm_rl.rollout import LlmRollout, RolloutHooks, RolloutSettings
from llm_rl.sample import Sample, SamplingParams, TrainRow
from llm_rl.scoring import RewardScorer, reward_options
from llm_rl.supervised import SupervisedRollout, plan_pairs, supervised_rows
from llm_rl.teachers import remote_teachers
from llm_rl.train_data import reward_normalization, samples_to_rows
from shared_runtime.config import flat_args
from shared_runtime.data.source import RolloutDataSource
from shared_runtime.engines.client import BatchingClient
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.tracking.log_hooks import LogHooks
from shared_runtime.tracking.sink import LoggedImage
from shared_runtime.training.plan import StepPlan, plan_rollout
from shared_runtime.workers import Workers


class LlmDomain:
    """Implements `shared_runtime.domain.Domain` for a prepared run.

    Args:
        prepared: The checked configuration with its tokenizer, prompts and hooks.
        workers: Rollout engines, absent when recorded rollouts are replayed, and scorers if there are.
        dp_size: Data-parallel trainer ranks.
    """

    def __init__(self, prepared: Prepared, workers: Workers, dp_size: int) -> None:
        config, hooks = prepared.config, prepared.hooks
        self.config, self.dp_size = config, dp_size
        self.args = flat_args(config)
        self.post_process = hooks.get("--custom-reward-post-process-path")
        self.convert = hooks.get("--custom-convert-samples-to-train-data-path")
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
            options=reward_options(config.reward.rm_url),
            pool=workers.reward_pool,
        )
        self.teachers = remote_teachers(config)
        self.state = GenerateState(
            args=self.args,
            tokenizer=prepared.tokenizer,
            encoder=prepared.encoder,
            client=_client(config, workers.engines),
            rollout_seed=config.run.rollout_seed,
            max_context=prepared.max_context,
            replayed_temperature=_replayed_temperature(config),
        )
        sampling = _sampling(config)
        self.roll_out = self._supervised(prepared) or LlmRollout(
            source=self.source,
            state=self.state,
            scorer=self.scorer,
            sampling=sampling,
            settings=_rollout_settings(config),
            hooks=RolloutHooks.of(hooks),
        )
        evaluation = config.evaluation
        self.evaluator = Evaluator(
            sets=prepared.eval_sets,
            state=self.state,
            scorer=self.scorer,
            sampling=eval_sampling(
                sampling,
                max_response_len=evaluation.eval_max_response_len,
                temperature=evaluation.eval_temperature,
                top_p=evaluation.eval_top_p,
                top_k=evaluation.eval_top_k,
            ),
            n_samples_per_eval_prompt=evaluation.n_samples_per_eval_prompt,
            on_reward_error=config.reward.on_reward_error,
            reward_key=config.reward.reward_key,
            generate_function=hooks.get("--custom-generate-function-path"),
            eval_function=hooks.get("--eval-function-path"),
        )

    def _supervised(self, prepared: Prepared) -> SupervisedRollout | None:
        """The rollout of a run whose responses are given."""
        if not self.config.supervised:
            return None
        batch_size = self.config.batch.rollout_batch_size
        assert batch_size is not None
        pairs = self.config.algorithm.loss_type == "dpo_loss"
        return SupervisedRollout(self.source, ConversationEncoder(prepared.encoder), batch_size, pairs=pairs)

    async def rollout(self, rollout_id: int) -> RolloutResult[Sample]:
        """Sample and score one batch under weights of version `rollout_id`."""
        self.state.weight_version = rollout_id
        result = await self.roll_out(rollout_id)
        result.metrics |= self.scorer.pop_metrics()
        seconds = result.generate_seconds + result.score_seconds
        samples = [sample for group in result.samples for sample in group]
        if self.teachers is not None:
            began = time.perf_counter()
            await asyncio.to_thread(self.teachers.score, samples)
            result.metrics["perf/teacher_time"] = time.perf_counter() - began
        if self.log_hooks.rollout(rollout_id, samples, result.metrics, seconds):
            result.metrics = {name: value for name, value in result.metrics.items() if name.startswith("perf/")}
        return result

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Score the evaluation sets under weights of version `rollout_id + 1`."""
        self.state.weight_version = rollout_id + 1
        result = await self.evaluator(rollout_id)
        self.scorer.pop_metrics()  # a rollout's are its own
        if self.log_hooks.evaluation(rollout_id, result.data, result.metrics):
            # The scores themselves stay: `--eval-target` and the summary are decided by them.
            scores = {f"eval/{name}" for name in result.data}
            return {name: value for name, value in result.metrics.items() if name in scores}
        return result.metrics

    def plan(self, rollout_id: int, rollout: RolloutResult[Sample]) -> list[list[StepPlan]]:
        """Training rows with rewards relative to their group, split over steps, ranks and micro-batches."""
        batch = self.config.batch
        layout: dict[str, Any] = {
            "dp_size": self.dp_size,
            "num_steps": batch.num_steps_per_rollout,
            "micro_batch_size": batch.micro_batch_size,
            "max_tokens_per_gpu": batch.max_tokens_per_gpu if batch.use_dynamic_batch_size else None,
            "balance_data": batch.balance_data,
        }
        if self.config.algorithm.loss_type == "dpo_loss":
            return plan_pairs(supervised_rows(rollout.samples), **layout)
        rows: list[Any] = list(self._rows(rollout))
        return plan_rollout(
            rows,
            [len(row["tokens"]) for row in rows],
            [row.get("sample_index", i) for i, row in enumerate(rows)],
            [int(row["loss_mask"].sum()) if "loss_mask" in row else row["response_length"] for row in rows],
            **layout,
        )

    def _rows(self, rollout: RolloutResult[Sample]) -> list[TrainRow]:
        if self.config.supervised:
            return supervised_rows(rollout.samples)
        algorithm = self.config.algorithm
        rows = samples_to_rows(
            rollout.samples,
            normalization=reward_normalization(
                algorithm.advantage_estimator, disable_std=algorithm.disable_grpo_std_normalization
            ),
            reward_key=self.config.reward.reward_key,
            post_process=self.post_process,
            convert=self.convert,
            num_candidates=self.config.sampling.rollout_top_logprobs_num,
            args=self.args,
        )
        if self.config.replays_support and not all("rollout_support_ids" in row for row in rows):
            raise ValueError(
                "some training rows have no rollout_support_ids, the tokens that --rollout-top-p and --rollout-top-k "
                "had left at each position"
            )
        return rows

    def sample_rows(self, rollout: RolloutResult[Sample]) -> list[dict[str, Any]]:
        """What `samples.jsonl` keeps of each sample."""
        return [
            {
                "index": sample.index,
                "group_index": sample.group_index,
                "prompt": sample.prompt,
                "response": sample.response,
                "label": sample.label,
                "reward": sample.reward,
                "status": sample.status.value,
                "weight_version": sample.weight_version_returned,
            }
            for group in rollout.samples
            for sample in group
        ]

    def sample_images(self, rollout_id: int, rollout: RolloutResult[Sample]) -> list[LoggedImage]:
        """Text has none."""
        return []

    def save(self, directory: Path) -> None:
        """Write the data source's state; everything else derives from ids."""
        self.source.save(directory)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        self.source.load(directory)

    def close(self) -> None:
        """End the scorer's threads and the connections to teachers."""
        self.scorer.close()
        if self.teachers is not None:
            self.teachers.close()


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


def _client(config: TrainConfig, engines: WorkerGroup | None) -> Any:
    if engines is None:
        return None
    return BatchingClient(engines, cost=lambda request: len(request.input_ids) + request.params.max_new_tokens)


def _sampling(config: TrainConfig) -> SamplingParams:
    sampling, teaching = config.sampling, config.distillation
    top = teaching.opd_log_prob_top_k if teaching.remote else sampling.rollout_top_logprobs_num
    return SamplingParams(
        max_new_tokens=sampling.rollout_max_response_len,
        temperature=sampling.rollout_temperature,
        top_p=sampling.rollout_top_p,
        top_k=sampling.rollout_top_k,
        stop=sampling.rollout_stop,
        stop_token_ids=sampling.rollout_stop_token_ids,
        top_logprobs_num=top,
        return_sampling_mask=config.replays_support,
    )


def _replayed_temperature(config: TrainConfig) -> float | None:
    replays = config.replays_support or config.algorithm.loss_type == "score_centering"
    return config.sampling.rollout_temperature if replays else None


def _rollout_settings(config: TrainConfig) -> RolloutSettings:
    batch, reward = config.batch, config.reward
    assert batch.rollout_batch_size is not None
    over = batch.over_sampling_batch_size
    return RolloutSettings(
        rollout_batch_size=batch.rollout_batch_size,
        over_sampling_batch_size=over if over != batch.rollout_batch_size else None,
        on_reward_error=reward.on_reward_error,
        reward_key=reward.reward_key,
        granularity=config.sampling.rollout_submission_granularity,
        max_in_flight=config.sampling.rollout_max_in_flight,
        save_debug_rollout_data=config.debug.save_debug_rollout_data,
        load_debug_rollout_data=config.debug.load_debug_rollout_data,
    )
