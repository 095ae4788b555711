"""What single built-in rewards can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shared_runtime.config import Problems

_NEEDED = {
    "pickscore": ("processor_path", "model_path"),
    "aesthetic": ("head_path",),
    "openai_api": ("config",),
    "custom_api": ("config",),
    "remote_rm": ("url",),
    "weighted_mixture": ("weights",),
}


@dataclass(frozen=True)
class RewardOptionsConfig:
    """Models, services and weights of built-in rewards (--rm-type, metadata.rm_type)."""

    pickscore_processor_path: str | None = None
    """CLIP processor of pickscore, such as laion/CLIP-ViT-H-14-laion2B-s32B-b79K."""
    pickscore_model_path: str | None = None
    """Model of pickscore, such as yuvalkirstain/PickScore_v1."""
    hps_version: Literal["v2.0", "v2.1"] = "v2.1"
    """Checkpoint of hps."""
    hps_checkpoint_path: str | None = None
    """Its file. Unset: from the hub."""
    clip_model_path: str | None = None
    """Model of clip. Unset: openai/clip-vit-large-patch14."""
    aesthetic_head_path: str | None = None
    """File of the aesthetic head."""
    aesthetic_model_path: str | None = None
    """CLIP model below it. Unset: openai/clip-vit-large-patch14."""
    ocr_engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """Engine of ocr."""
    openai_api_rm_config: str | None = None
    """Config of openai_api: a YAML file, or base64: and its payload."""
    custom_api_rm_config: str | None = None
    """Config of custom_api, likewise."""
    rm_url: str | None = None
    """Address of the service of remote_rm."""
    weighted_mixture_weights: str | None = None
    """Parts of weighted_mixture, such as ocr=0.8,pickscore=0.2; train on it with --reward-key weighted."""

    def options(self) -> dict[str, dict[str, Any]]:
        """Keyword arguments by reward, as `rewards.score` takes them; what is unset is left to the reward."""
        given: dict[str, dict[str, Any]] = {
            "pickscore": {"processor_path": self.pickscore_processor_path, "model_path": self.pickscore_model_path},
            "hps": {"version": self.hps_version, "checkpoint_path": self.hps_checkpoint_path},
            "clip": {"model_path": self.clip_model_path},
            "aesthetic": {"head_path": self.aesthetic_head_path, "model_path": self.aesthetic_model_path},
            "ocr": {"engine": self.ocr_engine},
            "openai_api": {"config": self.openai_api_rm_config},
            "custom_api": {"config": self.custom_api_rm_config},
            "remote_rm": {"url": self.rm_url},
            "weighted_mixture": {"weights": self.weighted_mixture_weights},
        }
        told = {
            name: {key: value for key, value in entry.items() if value is not None} for name, entry in given.items()
        }
        return {name: entry for name, entry in told.items() if entry}

    def check(self, problems: Problems, rm_type: str | None) -> None:
        """Note what the run's reward, or a part of its mixture, needs and lacks."""
        names = [rm_type]
        if rm_type == "weighted_mixture":
            names += [part.partition("=")[0].strip() for part in (self.weighted_mixture_weights or "").split(",")]
        options = self.options()
        for name in names:
            missing = [key for key in _NEEDED.get(name or "", ()) if key not in options.get(name or "", {})]
            for key in missing:
                flag = {"config": f"{name}-rm-config", "url": "rm-url"}.get(key, f"{name}-{key}").replace("_", "-")
                problems.add(f"the reward {name} needs --{flag}")
