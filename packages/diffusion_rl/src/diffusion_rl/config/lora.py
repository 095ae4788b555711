"""Low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the model stays frozen, and only they train."""

    use_lora: bool = False
    """Train low-rank adapters instead of the weights."""
    lora_rank: int = 64
    """Rank of the adapters."""
    lora_alpha: int = 64
    """Adapters count alpha / rank times."""
    lora_target_modules: tuple[str, ...] = ()
    """Layers to adapt, by their names or how these end, such as attn.to_q. Unset: the family's."""
    lora_init_weights: Literal["gaussian", "kaiming-uniform"] = "gaussian"
    """Start of the adapters' first matrix; the second one starts at zero."""
    lora_adapter_path: Path | None = None
    """Directory of adapters to continue from, as PEFT or this program writes them; rank and alpha must be theirs."""
