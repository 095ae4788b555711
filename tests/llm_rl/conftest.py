"""Lets the tests of this folder import the helpers that lie beside them; fixtures of the trainer tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_critic_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A value model over the tiny model's weights whose head is not zero."""
    import torch
    from transformers import AutoModelForTokenClassification

    directory = tmp_path_factory.mktemp("critic")
    model = AutoModelForTokenClassification.from_pretrained(tiny_model_dir, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        model.score.bias.fill_(0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny architecture with other and larger weights, so that it disagrees with the tiny model."""
    import torch
    from transformers import AutoModelForCausalLM

    from llm_rl.presets.tiny import write_model

    directory = tmp_path_factory.mktemp("teacher")
    write_model(directory, seed=3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
    model.save_pretrained(directory)
    return directory
