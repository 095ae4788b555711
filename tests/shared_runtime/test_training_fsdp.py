"""Precision policies, seeds, the blocks that are sharded, and moving to host memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from shared_runtime.precision.determinism import seed_everything, use_deterministic_kernels
from shared_runtime.precision.policy import PrecisionPolicy, dtype_name, torch_dtype
from shared_runtime.training.distributed import start_rank, stop_rank
from shared_runtime.training.fsdp import count_parameters, disable_dropout, find_blocks, fsdp_parts, shard_model
from shared_runtime.training.sleep import DeviceLease


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.experts[0](x) + self.experts[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("train_dtype", "keep", "expected"),
    [
        ("bf16", True, (torch.float32, torch.bfloat16, torch.float32)),
        ("bf16", False, (torch.bfloat16, torch.bfloat16, torch.float32)),
        ("fp32", True, (torch.float32, torch.float32, torch.float32)),
        ("fp64", True, (torch.float64, torch.float64, torch.float64)),
    ],
)
def test_precision_policy(train_dtype, keep, expected):
    policy = PrecisionPolicy.of(train_dtype, keep_fp32_master=keep)
    assert (policy.master, policy.compute, policy.reduce) == expected


def test_dtype_names_go_both_ways():
    assert torch_dtype("bf16") is torch_dtype("bfloat16") is torch.bfloat16
    assert torch_dtype(dtype_name(torch.float8_e4m3fn)) is torch.float8_e4m3fn
    with pytest.raises(ValueError, match="unknown dtype 'Tensor'"):
        torch_dtype("Tensor")


def test_seeding_covers_every_generator():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(2**40)
    assert draw() != first


def test_deterministic_kernels_are_switched_on_and_off():
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        use_deterministic_kernels(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_blocks_are_the_outermost_repeated_modules():
    model = Model()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(model, ["Block"]) == list(model.blocks)
    with pytest.raises(ValueError, match=r"has no blocks of class \['Decoder'\] to shard"):
        find_blocks(model, ["Decoder"])
    with pytest.raises(ValueError, match="has no blocks to shard"):
        find_blocks(nn.Linear(1, 1))


def test_sharded_model_computes_what_the_plain_one_does():
    torch.manual_seed(0)
    model = Model()
    disable_dropout(model)
    x = torch.randn(3, 4)
    expected = model(x)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    context = start_rank(device="cpu")
    try:
        shard_model(model, context, PrecisionPolicy.of("fp32"), blocks=find_blocks(model))
        assert len(fsdp_parts(model)) == 3
        assert count_parameters(model) == sum(g.numel() for g in gradients.values())
        out = model(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), gradients[name])
    finally:
        stop_rank(context)


def test_lease_refuses_work_asleep_and_wakes_for_a_block():
    lease = DeviceLease([Model()], [], torch.device("cpu"))
    lease.sleep()
    with pytest.raises(RuntimeError, match="call wake_up before training"):
        lease.require_awake("training")
    with lease.awake():
        lease.require_awake("training")
    assert lease.asleep
    lease.wake_up()
    with lease.awake():
        pass
    assert not lease.asleep
