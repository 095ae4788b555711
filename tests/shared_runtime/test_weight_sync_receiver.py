"""The engine's side of an update: what it accepts, what it refuses, and what it is after a failure."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shared_runtime.weight_sync.bucket import TensorMeta, pack, tensor_meta
from shared_runtime.weight_sync.checksum import tensor_sha256
from shared_runtime.weight_sync.receiver import TensorReceiver, WeightUpdateError


class Holder:
    """Two weights, of which the first has a second name."""

    def __init__(self) -> None:
        embed = torch.zeros(4, 2)
        self.tensors = {"embed.weight": embed, "norm.weight": torch.ones(2, dtype=torch.bfloat16), "head.weight": embed}
        self.receiver = TensorReceiver(lambda: self.tensors, version=3)


def new_weights() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(8.0).view(4, 2),
        "norm.weight": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    }


def metas(weights: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [tensor_meta(name, tensor) for name, tensor in weights.items()]


@pytest.mark.parametrize("tied_name", ["embed.weight", "head.weight"])
def test_an_update_lands_in_place_and_moves_both_names_of_a_tied_tensor(tied_name: str) -> None:
    holder, weights = Holder(), new_weights()
    weights = {tied_name: weights["embed.weight"], "norm.weight": weights["norm.weight"]}
    address = holder.tensors["embed.weight"].data_ptr()
    holder.receiver.begin(7, metas(weights))
    assert holder.receiver.apply(pack(0, [(tied_name, weights[tied_name])])) == 1
    assert holder.receiver.apply(pack(1, [("norm.weight", weights["norm.weight"])])) == 1
    report = holder.receiver.end()
    assert (report.version, report.num_tensors, report.num_bytes) == (7, 2, 32 + 4)
    assert holder.receiver.version == 7
    assert holder.tensors["head.weight"].data_ptr() == holder.tensors["embed.weight"].data_ptr() == address
    assert holder.tensors["head.weight"].tolist() == weights[tied_name].tolist()
    assert holder.tensors["norm.weight"].tolist() == [0.5, -2.0]
    assert holder.receiver.checksums() == {name: tensor_sha256(tensor) for name, tensor in weights.items()}


def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    holder = Holder()
    wrong = [
        TensorMeta("base_model.embed.weight", (4, 2), "float32", 32),
        TensorMeta("embed.weight", (2, 4), "float32", 32),
        TensorMeta("extra.bias", (1,), "float32", 4),
        TensorMeta("head.weight", (4, 2), "bfloat16", 16),
    ]
    with pytest.raises(WeightUpdateError) as raised:
        holder.receiver.begin(4, wrong)
    message = str(raised.value)
    assert "unknown to the engine: base_model.embed.weight, extra.bias" in message
    assert "missing from the update: norm.weight" in message
    assert "shapes differ: embed.weight [2, 4] (the engine's is [4, 2])" in message
    assert "dtypes differ: head.weight bfloat16 (the engine's is float32)" in message
    assert "one tied tensor in the engine, publish it once: embed.weight = head.weight" in message
    holder.receiver.check_usable()  # nothing has been touched


def test_a_tensor_that_was_not_announced_like_this_or_comes_twice() -> None:
    holder, weights = Holder(), new_weights()
    holder.receiver.begin(4, metas(weights))
    with pytest.raises(WeightUpdateError, match=r"brings TensorMeta\(name='other'"):
        holder.receiver.apply(pack(0, [("other", torch.zeros(1))]))
    with pytest.raises(WeightUpdateError, match=r"brings TensorMeta\(name='norm.weight'.*float32"):
        holder.receiver.apply(pack(0, [("norm.weight", torch.zeros(2))]))
    bucket = pack(0, list(weights.items())[:1])
    holder.receiver.apply(bucket)
    with pytest.raises(WeightUpdateError, match=r"embed.weight a second time"):
        holder.receiver.apply(bucket)


def test_corrupt_bytes_write_nothing() -> None:
    holder, weights = Holder(), new_weights()
    holder.receiver.begin(4, metas(weights))
    bucket = pack(0, list(weights.items()))
    data = bucket.data.copy()
    data[0] ^= 4
    with pytest.raises(ValueError, match="corrupt"):
        holder.receiver.apply(dataclasses.replace(bucket, data=data))
    assert holder.tensors["embed.weight"].tolist() == torch.zeros(4, 2).tolist()


def test_an_update_that_is_incomplete_can_not_end() -> None:
    holder, weights = Holder(), new_weights()
    holder.receiver.begin(4, metas(weights))
    holder.receiver.apply(pack(0, list(weights.items())[:1]))
    with pytest.raises(WeightUpdateError, match=r"incomplete, missing: norm\.weight"):
        holder.receiver.end()
    with pytest.raises(WeightUpdateError, match="version 4 is still open"):
        holder.receiver.check_usable()
    assert holder.receiver.version == 3


def test_after_an_abort_only_a_whole_update_makes_it_usable_again() -> None:
    holder, weights = Holder(), new_weights()
    holder.receiver.begin(4, metas(weights))
    holder.receiver.abort()
    with pytest.raises(WeightUpdateError, match="version 4 failed; publish the weights again"):
        holder.receiver.check_usable()
    holder.receiver.begin(5, metas(weights))
    with pytest.raises(WeightUpdateError, match="version 5 is still open"):
        holder.receiver.check_usable()
    holder.receiver.apply(pack(0, list(weights.items())))
    holder.receiver.end()
    holder.receiver.check_usable()
    assert holder.receiver.version == 5


def test_verbs_out_of_order() -> None:
    holder, weights = Holder(), new_weights()
    for verb in (lambda: holder.receiver.apply(pack(0, [])), holder.receiver.end):
        with pytest.raises(WeightUpdateError, match="no weight update is open"):
            verb()
    holder.receiver.begin(4, metas(weights))
    with pytest.raises(WeightUpdateError, match="version 4 is still open"):
        holder.receiver.begin(5, metas(weights))


def test_untied_tensors_of_equal_values_are_two() -> None:
    tensors = {"embed.weight": torch.zeros(4, 2), "head.weight": torch.zeros(4, 2)}
    receiver = TensorReceiver(lambda: tensors)
    with pytest.raises(WeightUpdateError, match=r"missing from the update: head\.weight"):
        receiver.begin(1, [tensor_meta("embed.weight", tensors["embed.weight"])])
    receiver.begin(1, metas(tensors))
