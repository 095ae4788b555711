"""Low-rank adapters against PEFT's own merge, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_runtime.training.lora import (
    LoraError,
    LoraWeight,
    adapter_names,
    adapter_tensors,
    adapters_disabled,
    add_adapters,
    matched_layers,
    merged_tensors,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(6, 8)
        self.out = nn.ModuleList([nn.Linear(8, 6, bias=False), nn.LayerNorm(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out[1](x + self.out[0](self.to_q(x).relu()))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


def adapted(*, trained: bool = True) -> nn.Module:
    module = model()
    add_adapters(module, rank=2, alpha=6, target_modules=["to_q", "out.0"], seed=3)
    if trained:
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return module


def test_new_adapters_change_nothing_and_only_they_train() -> None:
    plain, module, x = model(), adapted(trained=False), torch.randn(5, 6)
    assert torch.equal(module(x), plain(x))
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trainable == adapter_tensors(dict(module.named_parameters())).keys()
    assert len(trainable) == 8


def test_their_start_depends_on_the_seed_alone() -> None:
    first = adapter_tensors(dict(adapted(trained=False).named_parameters()))
    torch.randn(7)
    again = adapter_tensors(dict(adapted(trained=False).named_parameters()))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    deviation = torch.cat([a.flatten() for name, a in first.items() if "lora_A" in name]).std()
    assert 0.3 < deviation < 0.7  # gaussian: 1/r


def test_merging_is_pefts_and_leaves_the_base_alone() -> None:
    module, x = adapted(), torch.randn(5, 6)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    merged = merged_tensors(dict(module.named_parameters()), 6 / 2)
    values = {name: t.merged() if isinstance(t, LoraWeight) else t.detach() for name, t in merged.items()}
    output = module(x)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
    plain = model(seed=1)
    plain.load_state_dict(values)  # strict: the plain model's names, all of them
    torch.testing.assert_close(plain(x), output)
    for layer in [m for m in module.modules() if hasattr(m, "get_delta_weight")]:
        layer.merge()  # type: ignore[operator]
    for name, parameter in module.named_parameters():
        if ".base_layer." in name:
            assert torch.equal(values[name.replace(".base_layer", "")], parameter)


def test_disabled_inside_the_block_and_trainable_after_it() -> None:
    plain, module, x = model(), adapted(), torch.randn(5, 6)
    with adapters_disabled(module):
        assert torch.equal(module(x), plain(x))
    assert not torch.equal(module(x), plain(x))
    module(x).sum().backward()
    adapters = adapter_tensors(dict(module.named_parameters()))
    assert all(tensor.grad is not None for tensor in adapters.values())


def test_names_of_a_file() -> None:
    names = adapter_names(dict(adapted().named_parameters()))
    assert {"0.to_q.lora_A.weight", "1.out.0.lora_B.weight"} <= names.keys()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["to_q", "to_k", "o_q"], "--lora-target-modules to_k o_q: no linear layer of Sequential"),
        (["out.1"], "its layers end in 0.to_q, 1.to_q, out.0"),
        ([], "names no layer"),
    ],
)
def test_targets_that_match_nothing_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(LoraError, match=message.replace(".", r"\.")):
        matched_layers(model(), targets)
