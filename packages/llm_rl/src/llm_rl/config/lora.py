"""Low-rank adapters. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shared_runtime.config import Problems
from shared_runtime.config.problems import flag


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the model stays frozen, and only they train."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains the model itself."""
    lora_alpha: int = 16
    """Adapters count alpha / rank times."""
    target_modules: tuple[str, ...] = ()
    """Layers to adapt: attn, mlp, unembed, or ends of names such as q_proj. Unset, or all-linear: attn and mlp."""
    exclude_modules: tuple[str, ...] = ()
    """Ends of the names of layers that are left out again."""
    lora_adapter_path: Path | None = None
    """PEFT directory of adapters to continue from; rank and alpha must be theirs."""

    @property
    def use_lora(self) -> bool:
        """Whether adapters train instead of the model."""
        return self.lora_rank > 0

    def check(self, problems: Problems) -> None:
        """Note values that make no adapters, and settings of adapters that the run doesn't have."""
        problems.not_negative(lora_rank=self.lora_rank)
        problems.positive(lora_alpha=self.lora_alpha)
        if self.lora_rank == 0:
            for f in dataclasses.fields(self):
                if getattr(self, f.name) != f.default:
                    problems.add(f"{flag(f.name)} has no effect without --lora-rank")
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            problems.add("--target-modules all-linear stands alone: it means attn and mlp")
