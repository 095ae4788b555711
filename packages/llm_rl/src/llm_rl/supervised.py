"""Supervised and preference runs: their rows, checked, and a rollout that reads responses instead of drawing them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from llm_rl.conversations import ConversationEncoder
from llm_rl.sample import Sample, TrainRow
from llm_rl.train_data import sample_to_row
from shared_runtime.data.files import raise_problems
from shared_runtime.data.prompts import PromptDataset, PromptRow
from shared_runtime.data.source import DataSource
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.sample import Status
from shared_runtime.training.plan import StepPlan, plan_rollout

CHOSEN, REJECTED = "chosen", "rejected"
_MAX_PROBLEMS = 5


def load_pairs(
    path: str, *, input_key: str, chosen_key: str, rejected_key: str, metadata_key: str | None, flag: str = ""
) -> PromptDataset:
    """Preference pairs: rows whose label is `{"chosen": …, "rejected": …}`.

    Raises:
        DataError: For a file without these keys.
    """
    chosen, rejected = (
        PromptDataset.load(path, input_key=input_key, label_key=key, metadata_key=metadata_key, flag=flag)
        for key in (chosen_key, rejected_key)
    )
    rows = [
        dataclasses.replace(row, label={CHOSEN: row.label, REJECTED: other.label})
        for row, other in zip(chosen, rejected, strict=True)
    ]
    return PromptDataset(rows, chosen.path)


def responses_of(row: PromptRow | Sample, *, pairs: bool) -> list[Any]:
    """What is trained on of a row: its response, or both of a pair, the chosen one first."""
    return [row.label[CHOSEN], row.label[REJECTED]] if pairs else [row.label]


def check_rows(
    dataset: PromptDataset,
    encoder: ConversationEncoder,
    *,
    pairs: bool,
    max_context: int,
    max_tokens_per_gpu: int | None,
) -> None:
    """Check every row before anything starts.

    Args:
        dataset: The rows.
        encoder: As training will encode them.
        pairs: Whether they are preference pairs.
        max_context: Tokens that the model can attend to.
        max_tokens_per_gpu: Budget of a micro-batch, which holds both sequences of a pair.

    Raises:
        DataError: With file and line of rows without a response, that can't be encoded, or are too long.
    """
    problems: list[str] = []
    for position, row in enumerate(dataset):
        problem = _row_problem(row, encoder, pairs, max_context, max_tokens_per_gpu)
        if problem is not None:
            problems.append(f"{dataset.where(position)}: {problem}")
    further = len(problems) - _MAX_PROBLEMS
    raise_problems(problems[:_MAX_PROBLEMS] + ([f"{dataset.path}: {further} more rows like these"] * (further > 0)))


def _row_problem(
    row: PromptRow, encoder: ConversationEncoder, pairs: bool, max_context: int, budget: int | None
) -> str | None:
    responses = responses_of(row, pairs=pairs)
    if pairs and None in responses:
        return f"the pair has no {CHOSEN if responses[0] is None else REJECTED} response"
    if pairs and responses[0] == responses[1]:
        return "the chosen response equals the rejected one: there is nothing to prefer"
    try:
        lengths = [len(encoder.encode(row.prompt, response).tokens) for response in responses]
    except Exception as error:  # templates are programs of others
        return str(error) or type(error).__name__
    if max(lengths) > max_context:
        return f"the row has {max(lengths)} tokens, and the model's context is {max_context}"
    if budget is not None and sum(lengths) > budget:
        what = "both sequences of the pair have" if pairs else "the row has"
        return f"{what} {sum(lengths)} tokens, more than --max-tokens-per-gpu {budget}"
    return None


class SupervisedRollout:
    """Brings one batch of given responses after the other; nothing is generated or scored.

    Args:
        source: Where rows come from, in groups of one sample, or of two for pairs.
        encoder: Tokens and masks.
        batch_size: Rows a rollout (`--rollout-batch-size`).
        pairs: Whether they are preference pairs.
    """

    def __init__(
        self, source: DataSource[Sample], encoder: ConversationEncoder, batch_size: int, *, pairs: bool
    ) -> None:
        self.source, self.encoder, self.batch_size, self.pairs = source, encoder, batch_size, pairs

    async def __call__(self, rollout_id: int) -> RolloutResult[Sample]:
        """One batch; its metrics include `perf/rollout_time`."""
        started = time.perf_counter()
        groups = self.source.get_samples(self.batch_size)
        for group in groups:
            for sample, response in zip(group, responses_of(group[0], pairs=self.pairs), strict=True):
                self._fill(sample, response)
        samples = [sample for group in groups for sample in group]
        seconds = time.perf_counter() - started
        metrics = {
            "perf/rollout_time": seconds,
            "perf/reward_time": 0.0,
            "rollout/response_len/mean": sum(s.response_length for s in samples) / len(samples),
        }
        return RolloutResult(groups, metrics=metrics, generate_seconds=seconds)

    def _fill(self, sample: Sample, response: Any) -> None:
        conversation = self.encoder.encode(sample.prompt, response)
        sample.tokens, sample.prompt_length = list(conversation.tokens), conversation.prompt_length
        sample.loss_mask = list(conversation.loss_mask)
        sample.response = self.encoder.tokenizer.decode(sample.tokens[sample.prompt_length :])
        sample.status = Status.COMPLETED


def supervised_rows(groups: Sequence[Sequence[Sample]]) -> list[TrainRow]:
    """Training rows in the order of the groups; no reward plays a part."""
    return [sample_to_row(sample, 0.0, 0.0) for group in groups for sample in group]


def plan_pairs(
    rows: Sequence[TrainRow],
    *,
    dp_size: int,
    num_steps: int,
    micro_batch_size: int = 1,
    max_tokens_per_gpu: int | None = None,
    balance_data: bool = False,
) -> list[list[StepPlan]]:
    """As `plan_rollout`, with the two rows of a pair always in one micro-batch, the chosen one first.

    Args:
        rows: Chosen and rejected rows in turn.
        dp_size: Trainer ranks.
        num_steps: Optimizer steps.
        micro_batch_size: Rows a forward pass; at least one pair.
        max_tokens_per_gpu: Budget of a forward pass.
        balance_data: Give every rank about the same number of tokens.
    """
    tokens = [int(row["loss_mask"].sum()) for row in rows]  # type: ignore[attr-defined]
    lengths = [len(row["tokens"]) for row in rows]  # type: ignore[arg-type]
    firsts = range(0, len(rows), 2)
    plans = plan_rollout(
        [{"rows": rows[i : i + 2], "tokens": tokens[i : i + 2]} for i in firsts],
        [sum(lengths[i : i + 2]) for i in firsts],
        list(firsts),
        [sum(tokens[i : i + 2]) for i in firsts],
        dp_size=dp_size,
        num_steps=num_steps,
        micro_batch_size=max(1, micro_batch_size // 2),
        max_tokens_per_gpu=max_tokens_per_gpu,
        balance_data=balance_data,
    )
    return [[_unpaired(plan) for plan in rank] for rank in plans]


def _unpaired(plan: StepPlan) -> StepPlan:
    return StepPlan(
        rows=[row for pair in plan.rows for row in pair["rows"]],
        micro_batches=[[i for pair in batch for i in (2 * pair, 2 * pair + 1)] for batch in plan.micro_batches],
        global_num_samples=2 * plan.global_num_samples,
        global_num_tokens=plan.global_num_tokens,
        sample_num_tokens=[count for pair in plan.rows for count in pair["tokens"]],
    )
