"""The local engine: the Hugging Face model in this process, no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llm_rl.engines.decode import Row, decode
from llm_rl.engines.stopping import StopRule, end_of_sequence_ids
from llm_rl.sample import FinishReason, GenerateOutput, GenerateRequest
from shared_runtime.engines.in_process import InProcessEngine
from shared_runtime.precision.policy import dtype_name, torch_dtype


class RequestError(ValueError):
    """A request that can't be answered; the message names it."""


class LocalEngine(InProcessEngine):
    """An :class:`~shared_runtime.engines.contract.EngineWorker` around `AutoModelForCausalLM`.

    Requests are answered in batches of similar prompt length (see :mod:`llm_rl.engines.decode`). Log-probs are those of
    the distribution that a token was drawn from, after temperature, top-k and top-p; a greedy token (temperature 0) has
    its log-prob at temperature 1 without filters, as in SGLang. What a request gives depends on the weights, the
    request and its seed; the other requests of a batch change its log-probs by rounding only.

    Args:
        model_dir: Hugging Face directory.
        dtype: Of weights and computation: `fp32`, `bf16`, …
        device: Where the model runs.
        max_batch_size: At most this many rows at a time.
        context_length: Longest prompt and response together; by default the model's `max_position_embeddings`.
        attn_implementation: Passed to `from_pretrained`.
        weight_version: Version of the weights in `model_dir`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "fp32",
        device: str = "cpu",
        max_batch_size: int = 512,
        context_length: int | None = None,
        attn_implementation: str | None = None,
        weight_version: int = 0,
    ) -> None:
        from transformers import AutoTokenizer

        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = (
            _load(model_dir, torch_dtype(dtype), attn_implementation).to(self.device).eval().requires_grad_(False)
        )
        text_config = self.model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.context_length: int | None = context_length or getattr(text_config, "max_position_embeddings", None)
        eos_ids = end_of_sequence_ids(self.model.generation_config, text_config, self.tokenizer)
        self._ends = StopRule(eos_ids, self.tokenizer)
        self._start_receiving(weight_version)

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateOutput]:
        """Answer a batch of requests, in order.

        Raises:
            RequestError: A prompt is empty, too long or has unknown ids, or a parameter makes no sense.
            RuntimeError: The engine is paused or asleep.
            WeightUpdateError: Its weights are those of an unfinished or failed update.
            FloatingPointError: The model gives logits that are not numbers.
        """
        with self._serving():
            rows = [Row(request, self._checked_limit(request)) for request in requests]
            # Neighbours in length share a batch, and neighbours in content a prompt; the order of arrival has no say.
            ordered = sorted(rows, key=_batch_order)
            for start in range(0, len(rows), self.max_batch_size):
                decode(self.model, ordered[start : start + self.max_batch_size], self._ends)
            return [self._output(row) for row in rows]

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """What an update overwrites: parameters and buffers, by Hugging Face name."""
        return self.model.state_dict()

    def _move(self, device: torch.device) -> None:
        self.model.to(device)

    def health(self) -> dict[str, Any]:
        """A small dict of facts; raises when the weights are unusable."""
        self._receiver.check_usable()
        return {
            "engine": "local",
            "model": str(self.model.config._name_or_path),
            "dtype": dtype_name(self.model.dtype),
            "device": str(self.device),
            "num_parameters": self.model.num_parameters(),
            "context_length": self.context_length,
            "weight_version": self.weight_version,
            "paused": self._paused,
            "asleep": self._asleep,
        }

    def _checked_limit(self, request: GenerateRequest) -> int:
        """How many tokens the request may draw: what it asks for, or what the context leaves."""
        params, prompt = request.params, request.input_ids
        problems = []
        if not prompt:
            problems.append("its prompt is empty")
        elif min(prompt) < 0 or max(prompt) >= self.vocab_size:
            unknown = sorted({token for token in prompt if not 0 <= token < self.vocab_size})
            problems.append(f"the model has {self.vocab_size} token ids, not {unknown[:10]}")
        room = params.max_new_tokens if self.context_length is None else self.context_length - len(prompt)
        if room < 1:
            problems.append(f"its prompt of {len(prompt)} tokens leaves no room in a context of {self.context_length}")
        if params.max_new_tokens < 1:
            problems.append(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
        if not 0 <= params.temperature < float("inf"):
            problems.append(f"temperature must be finite and not negative, got {params.temperature}")
        if not 0 < params.top_p <= 1:
            problems.append(f"top_p must lie in (0, 1], got {params.top_p}")
        if params.top_k < 1 and params.top_k != -1:
            problems.append(f"top_k must be positive, or -1 for all, got {params.top_k}")
        if "" in params.stop:
            problems.append("a stop string is empty")
        if problems:
            raise RequestError(f"request {request.request_id!r} can't be answered: {'; '.join(problems)}")
        return min(params.max_new_tokens, room)

    def _output(self, row: Row) -> GenerateOutput:
        return GenerateOutput(
            request_id=row.request.request_id,
            output_ids=tuple(row.output_ids),
            log_probs=tuple(row.log_probs),
            top_ids=tuple(row.top_ids),
            top_log_probs=tuple(row.top_log_probs),
            support_ids=tuple(row.support_ids),
            finish_reason=FinishReason.STOP if row.stopped else FinishReason.LENGTH,
            weight_version=self.weight_version,
        )


def _batch_order(row: Row) -> tuple[int, tuple[int, ...], int]:
    return len(row.request.input_ids), row.request.input_ids, row.request.seed


def _load(model_dir: str | Path, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation=attn_implementation)
