"""The batch knobs and the identity that binds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sized
from dataclasses import dataclass
from typing import TypeVar

from shared_runtime.config.problems import ConfigError, Problems


@dataclass(frozen=True)
class BatchConfig:
    """How much is sampled and how it is consumed.

    `rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout`: give any three.
    """

    num_rollout: int | None = None
    """Rollouts in the whole run. Unset: one pass over the prompts."""
    rollout_batch_size: int | None = None
    """Prompts per rollout."""
    n_samples_per_prompt: int | None = None
    """Responses per prompt (the group size). Unset: 1, or what the other three knobs ask for."""
    global_batch_size: int | None = None
    """Samples per optimizer step."""
    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout."""
    over_sampling_batch_size: int | None = None
    """Prompts drawn at once when a dynamic filter rejects groups. Unset: rollout_batch_size."""
    micro_batch_size: int = 1
    """Samples per forward pass. Ignored with --use-dynamic-batch-size."""
    use_dynamic_batch_size: bool = False
    """Pack samples of any length into micro-batches of at most --max-tokens-per-gpu tokens."""
    max_tokens_per_gpu: int | None = None
    """Token budget of a micro-batch on one GPU (or CPU worker)."""
    balance_data: bool = False
    """Give every data-parallel rank about the same number of tokens."""


B = TypeVar("B", bound=BatchConfig)


def resolve_batch(batch: B, problems: Problems) -> B:
    """Fill in the knob that was left out, or note what does not fit, with the numbers.

    With `global_batch_size` and `num_steps_per_rollout` both unset there is one optimizer step a rollout.
    """
    before = len(problems.found)
    problems.positive(
        num_rollout=batch.num_rollout,
        rollout_batch_size=batch.rollout_batch_size,
        n_samples_per_prompt=batch.n_samples_per_prompt,
        global_batch_size=batch.global_batch_size,
        num_steps_per_rollout=batch.num_steps_per_rollout,
        over_sampling_batch_size=batch.over_sampling_batch_size,
        micro_batch_size=batch.micro_batch_size,
        max_tokens_per_gpu=batch.max_tokens_per_gpu,
    )
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is None:
        problems.add("--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch")
    if len(problems.found) > before:
        return batch
    prompts, group = batch.rollout_batch_size, batch.n_samples_per_prompt
    samples, steps = batch.global_batch_size, batch.num_steps_per_rollout
    identity = "rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout"
    if prompts is None:
        if samples is None:
            problems.add("--rollout-batch-size is missing: how many prompts a rollout draws")
            return batch
        group, steps = group or 1, steps or 1
        if samples * steps % group:
            problems.add(
                f"--global-batch-size {samples} x --num-steps-per-rollout {steps} = {samples * steps} samples can't be "
                f"split into groups of --n-samples-per-prompt {group} ({identity})"
            )
            return batch
        prompts = samples * steps // group
    elif group is None:
        if samples is not None and steps is not None:
            if samples * steps % prompts:
                problems.add(
                    f"--global-batch-size {samples} x --num-steps-per-rollout {steps} = {samples * steps} samples "
                    f"can't be spread evenly over --rollout-batch-size {prompts} prompts ({identity})"
                )
                return batch
            group = samples * steps // prompts
        else:
            group = 1
    total = prompts * group
    product = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {group} = {total} samples"
    if samples is None:
        steps = steps or 1
        if total % steps:
            problems.add(f"{product} can't be split into --num-steps-per-rollout {steps} equal steps ({identity})")
            return batch
        samples = total // steps
    elif steps is None:
        if total % samples:
            problems.add(f"{product} are no multiple of --global-batch-size {samples} ({identity})")
            return batch
        steps = total // samples
    elif samples * steps != total:
        problems.add(
            f"{product}, but --global-batch-size {samples} x --num-steps-per-rollout {steps} = {samples * steps}; "
            f"leave one of the four out and it is filled in ({identity})"
        )
        return batch
    over = batch.over_sampling_batch_size or prompts
    if over < prompts:
        problems.add(f"--over-sampling-batch-size {over} is below --rollout-batch-size {prompts}")
    return dataclasses.replace(
        batch,
        rollout_batch_size=prompts,
        n_samples_per_prompt=group,
        global_batch_size=samples,
        num_steps_per_rollout=steps,
        over_sampling_batch_size=over,
    )


def with_num_rollout(batch: B, prompts: Sized | None) -> B:
    """Fill in the length of the run: one pass over the prompts unless told otherwise.

    Raises:
        ConfigError: Without prompts to count.
    """
    if batch.num_rollout is not None:
        return batch
    if prompts is None:
        raise ConfigError(["--num-rollout is missing: a custom data source does not say how long a run is"])
    assert batch.rollout_batch_size is not None
    return dataclasses.replace(batch, num_rollout=max(1, len(prompts) // batch.rollout_batch_size))
