"""Teachers of on-policy distillation: servers that score the student's responses, and whether tokenizers agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_rl.algorithms.candidates import NO_CANDIDATE
from llm_rl.config import TrainConfig
from llm_rl.sample import Sample, TeacherTop
from rewards import RewardServiceError
from rewards.client import RewardClient, map_concurrently
from shared_runtime.data.prompts import PromptDataset, PromptRow
from shared_runtime.rollout.types import RolloutError, name_sample

DEFAULT = "default"
PROBED_TOKENS = 256
"""Token ids whose texts are compared with a server's."""


class RemoteTeachers:
    """Scores each sample with one teacher, by SGLang's `/generate` with `return_logprob` and nothing to generate.

    A server gets token ids, so it must have the student's tokenizer: :meth:`check_tokenizer`.

    Args:
        urls: Address of `/generate` by the teacher's name; `default` serves samples that name no teacher, or one that
            isn't there.
        key: Key of the metadata that names a sample's teacher.
        top_k: Ask for this many likely tokens at each position; 0 asks for the sampled ones alone.
        concurrency: Requests in flight at once.
        options: Further keyword arguments of `rewards.client.RewardClient`, such as `timeout_s` and `retries`.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        key: str = "opd_teacher",
        top_k: int = 0,
        concurrency: int = 64,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.key, self.top_k, self.concurrency = key, top_k, concurrency
        self._clients = {
            name: RewardClient(url, concurrency=concurrency, **(options or {})) for name, url in urls.items()
        }

    def route(self, metadata: Mapping[str, Any]) -> str | None:
        """The name of the teacher that this metadata asks for; `None` without one."""
        name = metadata.get(self.key)
        if isinstance(name, str) and name in self._clients:
            return name
        return DEFAULT if DEFAULT in self._clients else None

    def row_problems(self, dataset: PromptDataset) -> list[str]:
        """Rows without a teacher, each with its file and line."""
        return [
            f"{dataset.where(i)}: {self._missing(row)}" for i, row in enumerate(dataset) if not self.route(row.metadata)
        ]

    def score(self, samples: Sequence[Sample]) -> None:
        """Set `teacher_log_probs` of every sample (and `teacher_top`), at temperature 1. Blocks; call it in a thread.

        Raises:
            RewardServiceError: A teacher failed, or answered something else; the sample is named.
            RolloutError: A sample has no teacher, or the engine didn't report its likeliest tokens.
        """
        map_concurrently(self._score_one, [(sample,) for sample in samples], self.concurrency)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Compare the texts of token ids, spread over the vocabulary, with those of every server.

        Raises:
            ValueError: If a server doesn't answer, or has another tokenizer.
        """
        size = len(tokenizer)
        ids = sorted({i * size // PROBED_TOKENS for i in range(PROBED_TOKENS)})
        for name, client in self._clients.items():
            try:
                meta = _ask(client, ids, first=1, name=f"teacher {name}", return_text_in_logprobs=True)
            except RewardServiceError as error:
                raise ValueError(f"--opd-type sglang: {error}") from error
            for token, entry in zip(ids[1:], meta["input_token_logprobs"], strict=True):
                text = tokenizer.decode([token])
                if entry[2] != text:
                    raise ValueError(
                        f"--opd-type sglang: teacher {name} at {client.url} has another tokenizer than "
                        f"--hf-checkpoint: token {token} is {entry[2]!r} there and {text!r} here"
                    )

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def _score_one(self, sample: Sample) -> None:
        teacher = self.route(sample.metadata)
        if teacher is None:
            raise RolloutError(f"{name_sample(sample)}: {self._missing(sample)}")
        client, name = self._clients[teacher], name_sample(sample)
        wanted: dict[str, Any] = {}
        if self.top_k:
            if len(sample.rollout_topk_token_ids or []) != sample.response_length:
                raise RolloutError(f"{name}: the engine reported no likeliest tokens, which --opd-log-prob-top-k needs")
            candidates = sorted({token for ids in sample.rollout_topk_token_ids or [] for token in ids})
            wanted = {"top_logprobs_num": self.top_k, "token_ids_logprob": candidates}
        meta = _ask(client, sample.tokens, first=sample.prompt_length, name=name, **wanted)
        sample.teacher_log_probs = [float(entry[0]) for entry in meta["input_token_logprobs"]]
        if self.top_k:
            sample.teacher_top = _teacher_top(sample.rollout_topk_token_ids or [], meta, self.top_k)

    def _missing(self, row: PromptRow | Sample) -> str:
        return (
            f"metadata[{self.key!r}] is {row.metadata.get(self.key)!r}, but --opd-teacher-urls has "
            f"{', '.join(sorted(self._clients))} and no {DEFAULT}"
        )


def remote_teachers(config: TrainConfig) -> RemoteTeachers | None:
    """The servers that the run asks for log-probs, or `None`."""
    distillation = config.distillation
    if not distillation.remote:
        return None
    return RemoteTeachers(
        distillation.teachers(config.reward.rm_url),
        key=distillation.opd_teacher_key,
        top_k=distillation.opd_log_prob_top_k,
    )


def check_same_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Refuse a teacher whose tokens are not the student's.

    Args:
        tokenizer: The student's.
        directory: Hugging Face directory of the teacher.

    Raises:
        ValueError: With the first tokens that differ.
    """
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(directory).get_vocab()
    except Exception as error:
        raise ValueError(f"--opd-teacher-load {directory} has no tokenizer to compare: {error}") from error
    ours = tokenizer.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        raise ValueError(
            f"--opd-teacher-load {directory} has another tokenizer than --hf-checkpoint: {len(differing)} tokens "
            f"differ, among them {', '.join(map(repr, differing[:3]))}"
        )


def post_process_rewards(args: Any, samples: Iterable[Sample]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path` of pure distillation: rewards are logged, and 0 in training."""
    raw = [sample.scalar_reward(args.reward_key) for sample in samples]
    return raw, [0.0] * len(raw)


def _ask(client: RewardClient, tokens: Sequence[int], *, first: int, name: str, **options: Any) -> dict[str, list[Any]]:
    """What a server says of the tokens from `first` (at least 1) on: an entry a token in each of its lists.

    Entries of `input_token_logprobs` are (log-prob, id, text). Those of `input_top_logprobs` (`top_logprobs_num`) and
    of `input_token_ids_logprobs` (`token_ids_logprob`) are lists of such triples.

    Raises:
        RewardServiceError: It failed, or answered something else.
    """
    payload = {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": first - 1,  # the first entry has no log-prob
        **options,
    }
    asked = {"top_logprobs_num": "input_top_logprobs", "token_ids_logprob": "input_token_ids_logprobs"}
    names = ["input_token_logprobs", *(key for option, key in asked.items() if option in options)]
    answer = client.post(payload, name)
    try:
        meta = {key: answer["meta_info"][key][first - len(tokens) :] for key in names}
        entries = meta["input_token_logprobs"]
        fits = [entry[1] for entry in entries] == list(tokens[first:]) and all(
            isinstance(entry[0], float | int) for entry in entries
        )
        fits = fits and all(len(values) == len(entries) and None not in values for values in meta.values())
    except (KeyError, TypeError, IndexError) as error:
        raise RewardServiceError(f"{name}: {client.url} answered no {', '.join(names)}: {answer!r:.200}") from error
    if not fits:
        raise RewardServiceError(f"{name}: {client.url} answered log-probs of other tokens: {entries!r:.200}")
    return meta


def _teacher_top(student_ids: Sequence[Sequence[int]], meta: Mapping[str, list[Any]], k: int) -> TeacherTop:
    """The teacher's log-probs of the student's likeliest tokens and of its own, k slots a position."""
    of_student = []
    for ids, entries in zip(student_ids, meta["input_token_ids_logprobs"], strict=True):
        known = {entry[1]: float(entry[0]) for entry in entries}
        of_student.append([known[token] for token in ids])
    top = meta["input_top_logprobs"]
    return TeacherTop(
        student_ids=[_filled(ids, NO_CANDIDATE, k) for ids in student_ids],
        student_ids_log_probs=[_filled(values, 0.0, k) for values in of_student],
        teacher_ids=[_filled([entry[1] for entry in entries], NO_CANDIDATE, k) for entries in top],
        teacher_ids_log_probs=[_filled([float(entry[0]) for entry in entries], 0.0, k) for entries in top],
    )


def _filled(values: Sequence[Any], filler: Any, size: int) -> list[Any]:
    return [*values, *[filler] * (size - len(values))]
