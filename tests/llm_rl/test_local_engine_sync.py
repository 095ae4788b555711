"""Weights from the FSDP trainer to the local engine: the engine then computes what the trainer does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_helpers import make_trainer, row_log_probs

from llm_rl.engines.local import LocalEngine
from llm_rl.presets import tiny
from llm_rl.sample import GenerateOutput, GenerateRequest, SamplingParams
from llm_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta
from shared_runtime.weight_sync.receiver import WeightUpdateError
from shared_runtime.weight_sync.session import publish

REQUESTS = [
    GenerateRequest(f"{prompt}/{seed}", prompt, SamplingParams(max_new_tokens=10), seed)
    for prompt in ((6, 10, 13, 3, 8, 14), (5,), (9, 9, 13))
    for seed in range(4)
]


def build(directory: Path, tied: bool) -> Path:
    config = tiny.build_config()
    config.tie_word_embeddings = tied
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(3)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tiny.build_tokenizer().save_pretrained(directory)
    return directory


def disturb(trainer: FsdpTrainer, seed: int) -> None:
    """Stands for training: every weight moves, those that are 1 included."""
    torch.manual_seed(seed)
    trainer.model.reshard()  # a forward pass may have left whole parameters behind
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.to_local().add_(torch.randn_like(parameter.to_local()) * 0.2)  # type: ignore[operator]


def difference(trainer: FsdpTrainer, outputs: list[GenerateOutput]) -> float:
    """Largest absolute difference between the engine's log-probs and the trainer's of the same tokens."""
    worst = 0.0
    for request, output in zip(REQUESTS, outputs, strict=True):
        row = {"tokens": request.input_ids + output.output_ids, "response_length": len(output.output_ids)}
        with torch.no_grad():
            expected = row_log_probs(trainer.model, row)
        worst = max(worst, float(np.abs(expected.numpy() - np.array(output.log_probs)).max()))
    return worst


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FsdpTrainer, LocalEngine]]:
    directory = build(tmp_path, tied=request.param)
    trainer = make_trainer(directory, attn_implementation="sdpa")
    yield trainer, LocalEngine(directory, weight_version=4)
    trainer.shutdown()


def test_before_they_differ_after_they_agree(pair: tuple[FsdpTrainer, LocalEngine]) -> None:
    trainer, engine = pair
    tied = trainer.model.config.tie_word_embeddings
    assert difference(trainer, engine.generate(REQUESTS)) < 1e-5
    for version, buffer_size in ((5, 1 << 30), (6, 200_000)):
        disturb(trainer, seed=version)
        before = engine.generate(REQUESTS)
        assert difference(trainer, before) > 0.01
        assert {output.weight_version for output in before} == {version - 1}
        metrics = publish(
            InProcessGroup(trainer), InProcessGroup(engine), version, buffer_size=buffer_size, check_equal=True
        )
        after = engine.generate(REQUESTS)
        assert difference(trainer, after) < 1e-5
        assert {output.weight_version for output in after} == {version}
        assert (engine.model.lm_head.weight is engine.model.model.embed_tokens.weight) == tied
        assert metrics["perf/update_weights_bytes"] == 4 * (789_760 + (0 if tied else 15 * 128))
        assert metrics["perf/update_weights_tensors"] == (46 if tied else 47)
        assert (metrics["perf/update_weights_buckets"] == 1) == (buffer_size == 1 << 30)


class Broken:
    """A trainer that breaks one update in a way of its choice."""

    def __init__(self, trainer: FsdpTrainer, how: str) -> None:
        self.trainer, self.how = trainer, how

    def weight_metadata(self) -> list[TensorMeta]:
        metas = self.trainer.weight_metadata()
        first = metas[0]
        match self.how:
            case "renamed":
                metas[0] = TensorMeta("base_model.model." + first.name, first.shape, first.dtype, first.nbytes)
            case "missing":
                metas.pop(7)
            case "shape":
                metas[0] = TensorMeta(first.name, first.shape[::-1], first.dtype, first.nbytes)
            case "dtype":
                metas[0] = TensorMeta(first.name, first.shape, "bfloat16", first.nbytes // 2)
        return metas

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        bucket = self.trainer.export_bucket(names, index)
        if index == 2 and self.how == "truncated":
            return Bucket(index, bucket.tensors, bucket.data[:-16], bucket.checksum)
        if index == 2 and self.how == "corrupt":
            bucket.data[1000] ^= 32
        if index == 2 and self.how == "dies":
            raise MemoryError("no room for bucket 2")
        return bucket


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("renamed", WeightUpdateError, r"unknown to the engine: base_model\.model\.model\.embed_tokens\.weight"),
        ("renamed", WeightUpdateError, r"missing from the update: model\.embed_tokens\.weight"),
        ("missing", WeightUpdateError, r"missing from the update: model\.layers\.0\.\w+"),
        ("shape", WeightUpdateError, r"embed_tokens\.weight \[128, 15\] \(the engine's is \[15, 128\]\)"),
        ("dtype", WeightUpdateError, r"embed_tokens\.weight bfloat16 \(the engine's is float32\)"),
        ("truncated", ValueError, "bucket 2 is corrupt"),
        ("corrupt", ValueError, "bucket 2 is corrupt"),
        ("dies", MemoryError, "no room for bucket 2"),
    ],
)
def test_a_broken_update_is_an_error_and_never_a_wrong_policy(
    tiny_model_dir: Path, how: str, error: type[Exception], message: str
) -> None:
    trainer, engine = make_trainer(tiny_model_dir, attn_implementation="sdpa"), LocalEngine(tiny_model_dir)
    disturb(trainer, seed=1)
    engines = InProcessGroup(engine)
    with pytest.raises(error, match=message):
        publish(InProcessGroup(Broken(trainer, how)), engines, 1, buffer_size=400_000)
    for refused in (lambda: engine.generate(REQUESTS), engine.health):
        with pytest.raises(WeightUpdateError, match="publish the weights again"):
            refused()
    publish(InProcessGroup(trainer), engines, 2, buffer_size=400_000)
    outputs = engine.generate(REQUESTS)
    assert difference(trainer, outputs) < 1e-5
    assert {output.weight_version for output in outputs} == {2}
    trainer.shutdown()


def test_a_bf16_engine_gets_bf16_tensors(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, publish_dtype="bf16")
    engine = LocalEngine(tiny_model_dir, dtype="bf16")
    disturb(trainer, seed=1)
    metrics = publish(InProcessGroup(trainer), InProcessGroup(engine), 1, buffer_size=400_000, check_equal=True)
    assert metrics["perf/update_weights_bytes"] == 2 * 789_760
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(engine.model.get_parameter(name), parameter.full_tensor().bfloat16())
    trainer.shutdown()


def test_a_sleeping_engine_takes_an_update_too(tiny_model_dir: Path) -> None:
    trainer, engine = make_trainer(tiny_model_dir, attn_implementation="sdpa"), LocalEngine(tiny_model_dir)
    disturb(trainer, seed=1)
    engine.sleep()
    publish(InProcessGroup(trainer), InProcessGroup(engine), 1, buffer_size=1 << 30)
    engine.wake_up()
    assert difference(trainer, engine.generate(REQUESTS)) < 1e-5
    trainer.shutdown()
