"""Buckets: bytes in, the same tensors out; sizes, order, atomic groups, corruption."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, pack, plan_buckets, tensor_meta, unpack
from shared_runtime.weight_sync.checksum import compare_checksums, list_names, tensor_sha256


def meta(name: str, nbytes: int) -> TensorMeta:
    return TensorMeta(name, (nbytes,), "uint8", nbytes)


def odd_tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("bf16", torch.randn(3, 5, generator=generator).to(torch.bfloat16)),
        ("byte", torch.arange(7, dtype=torch.uint8)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("transposed", torch.randn(4, 6, generator=generator).t()),
        ("strided", torch.randn(8, 4, generator=generator)[::2, 1:3]),
        ("empty", torch.empty(0, 4)),
        ("int", torch.tensor([2**62, -1])),
        ("flag", torch.tensor([True, False, True])),
        ("odd", torch.tensor([float("nan"), float("-inf"), -0.0], dtype=torch.float16)),
    ]


def test_a_bucket_gives_back_the_same_bytes() -> None:
    tensors = odd_tensors()
    bucket = pack(4, tensors)
    assert bucket.index == 4
    assert bucket.checksum == zlib.crc32(bucket.data.tobytes())
    assert bucket.data.nbytes % 16 == 0
    unpacked = list(unpack(bucket))
    assert [m.name for m, _ in unpacked] == [name for name, _ in tensors]
    for (_, original), (described, value) in zip(tensors, unpacked, strict=True):
        assert value.dtype == original.dtype
        assert tuple(value.shape) == tuple(original.shape) == described.shape
        assert value.contiguous().view(-1).view(torch.uint8).tolist() == (
            original.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_every_tensor_starts_at_a_multiple_of_16_bytes() -> None:
    bucket = pack(0, [("a", torch.full((3,), 7, dtype=torch.uint8)), ("b", torch.tensor([1.0]))])
    expected = bytes([7, 7, 7]) + bytes(13) + np.float32(1.0).tobytes() + bytes(12)
    assert bucket.data.tobytes() == expected


def test_the_source_may_be_overwritten_after_packing() -> None:
    buffer = torch.arange(6.0)
    bucket = pack(0, [("w", buffer)])
    buffer.zero_()
    ((_, value),) = unpack(bucket)
    assert value.tolist() == [0, 1, 2, 3, 4, 5]


def test_read_only_bytes_are_unpacked_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    bucket = pack(0, [("w", torch.ones(3))])
    bucket.data.flags.writeable = False
    ((_, value),) = unpack(bucket)
    assert value.tolist() == [1, 1, 1]
    assert not recwarn.list


@pytest.mark.parametrize("position", [0, 5, 63])
def test_one_flipped_bit_is_refused(position: int) -> None:
    bucket = pack(2, [("w", torch.arange(16.0))])
    bucket.data[position] ^= 1
    with pytest.raises(ValueError, match="bucket 2 is corrupt"):
        list(unpack(bucket))


def test_sizes_that_do_not_fit_are_refused() -> None:
    bucket = pack(0, [("w", torch.arange(8.0))])
    longer = dataclasses.replace(bucket.tensors[0], shape=(9,))
    with pytest.raises(ValueError, match="does not describe 32 bytes"):
        list(unpack(dataclasses.replace(bucket, tensors=(longer,))))
    cut = bucket.data[:16].copy()
    with pytest.raises(ValueError, match="has 16 bytes, its tensors need 32"):
        list(unpack(Bucket(0, bucket.tensors, cut, zlib.crc32(cut.tobytes()))))


def test_metadata_describes_the_published_dtype() -> None:
    weight = torch.zeros(3, 2)
    assert tensor_meta("w", weight) == TensorMeta("w", (3, 2), "float32", 24)
    assert tensor_meta("w", weight, torch.bfloat16) == TensorMeta("w", (3, 2), "bfloat16", 12)


def test_buckets_are_filled_in_order_up_to_the_limit() -> None:
    metas = [meta("a", 32), meta("b", 16), meta("c", 16), meta("d", 64), meta("e", 100), meta("f", 1)]
    # a+b+c is exactly the limit; e (112 with alignment) is larger than it and travels alone.
    assert plan_buckets(metas, 64) == [("a", "b", "c"), ("d",), ("e",), ("f",)]
    assert plan_buckets(metas, 10_000) == [("a", "b", "c", "d", "e", "f")]
    assert plan_buckets([], 64) == []


def test_an_atomic_group_travels_together_at_its_first_member() -> None:
    metas = [meta("a", 16), meta("b", 16), meta("c", 16), meta("a2", 48)]
    assert plan_buckets(metas, 32, [("a", "a2")]) == [("a", "a2"), ("b", "c")]
    assert plan_buckets(metas, 64, [("a2", "c")]) == [("a", "b"), ("a2", "c")]


@pytest.mark.parametrize(
    ("limit", "groups", "message"),
    [
        (0, (), "--update-weight-buffer-size must be positive"),
        (64, (("a", "nowhere"),), "'nowhere', which is not published"),
        (64, (("a", "b"), ("b", "c")), "'b' is in two atomic groups"),
    ],
)
def test_plans_that_make_no_sense(limit: int, groups: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets([meta(name, 8) for name in "abc"], limit, groups)


def test_a_name_published_twice() -> None:
    with pytest.raises(ValueError, match="published twice: a"):
        plan_buckets([meta("a", 8), meta("b", 8), meta("a", 8)], 64)


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 200), max_size=20),
    limit=st.integers(1, 300),
    pairs=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=4),
)
def test_plans_hold_their_promises(sizes: list[int], limit: int, pairs: list[tuple[int, int]]) -> None:
    metas = [meta(str(i), size) for i, size in enumerate(sizes)]
    used: set[int] = set()
    groups = []
    for a, b in pairs:
        if a != b and max(a, b) < len(sizes) and not {a, b} & used:
            used |= {a, b}
            groups.append((str(a), str(b)))
    plan = plan_buckets(metas, limit, groups)
    assert sorted(name for bucket in plan for name in bucket) == sorted(m.name for m in metas)
    for group in groups:
        assert sum(set(group) <= set(bucket) for bucket in plan) == 1
    for bucket in plan:
        total = sum(-(-sizes[int(name)] // 16) * 16 for name in bucket)
        assert total <= limit or len(bucket) == 1 or bucket in groups
    if not groups:
        assert [name for bucket in plan for name in bucket] == [m.name for m in metas]


def test_sha256_is_that_of_the_row_major_bytes() -> None:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert tensor_sha256(weight) == hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    assert tensor_sha256(weight.t()) == hashlib.sha256(np.ascontiguousarray(weight.numpy().T).tobytes()).hexdigest()
    assert tensor_sha256(weight.bfloat16()) != tensor_sha256(weight)
    assert tensor_sha256(torch.empty(0)) == hashlib.sha256(b"").hexdigest()


def test_differences_are_listed_by_name() -> None:
    compare_checksums({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, "engine 0")
    with pytest.raises(ValueError, match=r"engine 3 .*not in the engine: c; only in the engine: d; different bytes: b"):
        compare_checksums({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "3"}, "engine 3")
    assert list_names(f"{i:02d}" for i in range(23)).endswith("18, 19 and 3 more")
