"""Which family a checkpoint is of, and what bad checkpoints get."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffusion_rl.models import registry
from diffusion_rl.models.loading import check_size, load_component
from diffusion_rl.models.qwen_image import QwenImage
from diffusion_rl.models.registry import (
    FAMILIES,
    FamilyError,
    check_checkpoint,
    check_task,
    get_family,
    match_family,
    resolve_family,
)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", "sd3"),
        ("stabilityai/stable-diffusion-3-medium-diffusers", "sd3"),
        ("/models/SD3-finetuned", "sd3"),
        ("Qwen/Qwen-Image", "qwen_image"),
        ("Qwen/Qwen-Image-2512", "qwen_image"),
    ],
)
def test_names_tell_the_family(name: str, family: str) -> None:
    assert resolve_family(name).name == family


def test_the_longest_match_wins_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(QwenImage):
        name = "qwen_image21"
        name_patterns = ("qwen-image-2.1",)

    for families in ({**FAMILIES, "qwen_image21": Newer()}, {"qwen_image21": Newer(), **FAMILIES}):
        monkeypatch.setattr(registry, "FAMILIES", families)
        assert resolve_family("Qwen/Qwen-Image-2.1").name == "qwen_image21"
        assert resolve_family("Qwen/Qwen-Image").name == "qwen_image"


def test_a_local_directory_is_matched_by_its_own_name_only(tmp_path: Path) -> None:
    directory = tmp_path / "sd3-experiments" / "my-model"
    directory.mkdir(parents=True)
    assert match_family(str(directory)) is None
    (directory / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    with pytest.raises(FamilyError, match="pass --diffusion-model-family qwen_image"):
        resolve_family(str(directory))
    assert resolve_family(str(directory), "qwen_image").name == "qwen_image"


def test_unknown_names_list_the_known_ones() -> None:
    for call in (lambda: resolve_family("black-forest-labs/FLUX.1-dev"), lambda: get_family("flux")):
        with pytest.raises(FamilyError, match=r"sd3 .*qwen_image"):
            call()


def test_tasks() -> None:
    check_task(get_family("sd3"), "t2i")
    with pytest.raises(FamilyError, match="'t2v': the sd3 family has t2i"):
        check_task(get_family("sd3"), "t2v")


def test_bad_checkpoints(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    sd3 = get_family("sd3")
    check_checkpoint(str(tiny_sd3_dir), sd3)
    with pytest.raises(FamilyError, match="no diffusers pipeline"):
        check_checkpoint(str(tmp_path), sd3)
    with pytest.raises(FamilyError, match="is a StableDiffusion3Pipeline; the qwen_image family needs"):
        check_checkpoint(str(tiny_sd3_dir), get_family("qwen_image"))
    broken = tmp_path / "sd3-broken"
    shutil.copytree(tiny_sd3_dir, broken)
    shutil.rmtree(broken / "vae")
    with pytest.raises(FamilyError, match="lacks vae"):
        check_checkpoint(str(broken), sd3)
    check_checkpoint("some/hub-name", sd3)


def test_sizes_that_the_vae_cannot_divide(tiny_sd3_dir: Path) -> None:
    check_size(str(tiny_sd3_dir), get_family("sd3"), 64, 128)
    with pytest.raises(ValueError, match="--diffusion-width 60 must be a multiple of 16 for this checkpoint: 48 or 64"):
        check_size(str(tiny_sd3_dir), get_family("sd3"), 64, 60)


def test_the_transformer_loads_alone(tiny_sd3_dir: Path) -> None:
    module = load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer", dtype=torch.float32)
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(1.7e6, rel=0.02)
    with pytest.raises(FamilyError, match="no component 'transformer_2'"):
        load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer_2", dtype=torch.float32)


def test_declarations_name_layers_that_exist(tiny_sd3_dir: Path, tiny_qwen: object) -> None:
    sd3 = load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer", dtype=torch.float32)
    for family, transformer in ((get_family("sd3"), sd3), (get_family("qwen_image"), tiny_qwen.transformer)):
        names = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
        for target in family.lora_target_modules:
            assert any(name.endswith(f".{target}") for name in names), (family.name, target)
        classes = {type(module).__name__ for module in transformer.modules()}
        assert set(family.block_modules) <= classes


def test_the_registry_needs_no_torch() -> None:
    code = "import sys; import diffusion_rl.models.registry, diffusion_rl.sample; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
