"""Adapters on disk: what PEFT writes is read back and merged as PEFT does it; everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from shared_runtime.training.lora import LoraError, add_adapters
from shared_runtime.training.lora_files import (
    AdapterConfig,
    check_adapter_config,
    load_adapters,
    merge_adapters,
    read_adapter_config,
    read_adapters,
)

FLAG = "--lora-adapter-path"


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def written(folder: Path, targets: tuple[str, ...] = ("0", "1"), **changes: Any) -> tuple[Path, Any]:
    """A PEFT model with adapters that change something, and the directory that it was saved to."""
    config = LoraConfig(r=2, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, **changes)
    model = get_peft_model(plain(), config)
    model.save_pretrained(str(folder))
    return folder, model


def test_pefts_directory_is_read_loaded_and_merged(tmp_path: Path) -> None:
    directory, theirs = written(tmp_path / "adapters")
    config = read_adapter_config(directory, FLAG)
    assert config == AdapterConfig(2, 6.0)
    x = torch.randn(4, 5)
    expected = theirs(x)
    ours = plain()
    add_adapters(ours, rank=2, alpha=6, target_modules=["0", "1"])
    load_adapters(ours, read_adapters(directory), FLAG)
    assert torch.equal(ours(x), expected)
    merged = plain()
    merge_adapters(merged, read_adapters(directory), config.scaling, FLAG)
    torch.testing.assert_close(merged(x), expected, rtol=1e-6, atol=1e-6)
    theirs_merged = theirs.merge_and_unload()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, theirs_merged.get_parameter(name), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"use_rslora": True}, "use_rslora"), ({"rank_pattern": {"0": 1}}, "rank_pattern"), ({"bias": "all"}, "bias")],
)
def test_other_kinds_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    directory, _ = written(tmp_path / "adapters", **changes)
    with pytest.raises(LoraError, match=f"has {named}, and only plain LoRA"):
        read_adapter_config(directory, FLAG)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match=r"holds no adapters: it needs adapter_config\.json"):
        read_adapter_config(tmp_path, FLAG)
    directory, _ = written(tmp_path / "adapters", targets=("0",))
    with pytest.raises(LoraError, match="give --lora-rank 2 --lora-alpha 6, not 4 and 8"):
        check_adapter_config(read_adapter_config(directory, FLAG), 4, 8, FLAG)
    ours = plain()
    add_adapters(ours, rank=2, alpha=6, target_modules=["0", "1"])
    with pytest.raises(LoraError, match=r"has 1\.lora_A\.weight, 1\.lora_B\.weight more and none less"):
        load_adapters(ours, read_adapters(directory), FLAG)
    with pytest.raises(LoraError, match="0 is not there, or has another shape"):
        merge_adapters(nn.Sequential(nn.Linear(4, 4)), read_adapters(directory), 3.0, FLAG)


def test_diffusers_file_without_its_metadata_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "pytorch_lora_weights.safetensors"
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": 2})}
    save_file({"transformer.0.lora_A.weight": torch.zeros(2, 5)}, file, metadata)
    with pytest.raises(LoraError, match="does not say the rank and alpha of its transformer adapters"):
        read_adapter_config(tmp_path, FLAG, component="transformer")
