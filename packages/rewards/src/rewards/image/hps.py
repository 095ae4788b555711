"""`hps`: Human Preference Score v2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rewards.image.pixels import request_image, request_prompt
from rewards.image.torch_common import batches, choose_device, unit_features
from rewards.request import RewardRequest, Score

_REPOSITORY = "xswu/HPSv2"
_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class HpsScorer:
    """image · prompt, both of length 1, of a preference-tuned CLIP (Wu et al. 2023, https://arxiv.org/abs/2306.09341).

    Images only; a video is an error, as it would need a rule for its frames.

    Args:
        version: `v2.0` or `v2.1`: which file is fetched without a `checkpoint_path`.
        checkpoint_path: A local checkpoint, `{"state_dict": ...}` or the bare state dict; by default the version's
            file of `xswu/HPSv2` from the model hub.
        batch_size: Images a batch.
        device: `cuda`, `cpu`, ...; by default the GPU if there is one.
        model_name: The open_clip architecture of the checkpoint.
    """

    def __init__(
        self,
        version: Literal["v2.0", "v2.1"] = "v2.1",
        checkpoint_path: str | None = None,
        batch_size: int = 8,
        device: str | None = None,
        model_name: str = "ViT-H-14",
    ) -> None:
        if version not in _FILES:
            raise ValueError(f"unknown HPS version {version!r} (--hps-version): {' or '.join(_FILES)}")
        import open_clip

        self._device, self._batch_size = choose_device(device), batch_size
        model, _, self._transform = open_clip.create_model_and_transforms(model_name, pretrained=None, precision="fp32")
        model.load_state_dict(_state_dict(checkpoint_path or _download(_FILES[version])))
        self._model: Any = model.eval().to(self._device)
        self._tokenizer = open_clip.get_tokenizer(model_name)

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score in [-1, 1] a request; real ones lie around 0.2 to 0.35.

        Raises:
            LabelError: A request without prompt or image, or with a video.
        """
        import torch
        from PIL import Image

        pairs = [(request_image(request, "hps"), request_prompt(request, "hps")) for request in requests]
        scores: list[Score] = []
        with torch.inference_mode():
            for batch in batches(pairs, self._batch_size):
                pixels = torch.stack([self._transform(Image.fromarray(frame)) for frame, _ in batch])
                tokens = self._tokenizer([prompt for _, prompt in batch])
                images = unit_features(self._model.encode_image(pixels.to(self._device)))
                texts = unit_features(self._model.encode_text(tokens.to(self._device)))
                scores += (images * texts).sum(dim=-1).tolist()
        return scores


def _state_dict(path: str) -> dict[str, Any]:
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return loaded.get("state_dict", loaded)


def _download(file: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(_REPOSITORY, file)
