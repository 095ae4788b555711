"""`clip`: agreement of image and prompt by a CLIP model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rewards.image.pixels import Frame, request_prompt
from rewards.image.torch_common import batches, choose_device, choose_dtype, mean_over_frames, unit_features
from rewards.request import RewardRequest, Score

if TYPE_CHECKING:
    import torch


class ClipScorer:
    """exp(logit_scale) · cos(image, prompt) / 30 (Radford et al. 2021, https://arxiv.org/abs/2103.00020).

    Prompts are cut to the 77 tokens of CLIP. A video scores the mean over its frames.

    Args:
        model_path: A checkpoint of `transformers.CLIPModel`: a directory or a hub name.
        processor_path: Its processor, where that is elsewhere.
        batch_size: Frames a batch.
        num_frames: Frames of a video, evenly spaced; `None` scores every one.
        device: `cuda`, `cpu`, ...; by default the GPU if there is one.
        dtype: Of the weights.
    """

    name = "clip"
    divisor = 30.0

    def __init__(
        self,
        model_path: str = "openai/clip-vit-large-patch14",
        processor_path: str | None = None,
        batch_size: int = 8,
        num_frames: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        from transformers import CLIPModel, CLIPProcessor

        self._device, self._dtype = choose_device(device), choose_dtype(dtype)
        self._processor = CLIPProcessor.from_pretrained(processor_path or model_path)
        self._model = CLIPModel.from_pretrained(model_path, dtype=self._dtype).eval().to(self._device)
        self._batch_size, self._num_frames = batch_size, num_frames

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request.

        Raises:
            LabelError: A request without prompt or image.
        """
        import torch

        with torch.inference_mode():
            texts = self._text_features([request_prompt(request, self.name) for request in requests])
            scale = self._model.logit_scale.float().exp()

            def score_batch(frames: list[Frame], owners: list[int]) -> torch.Tensor:
                similarity = (self._image_features(frames) * texts[owners]).sum(dim=-1)
                return (scale * similarity / self.divisor).cpu()

            return list(mean_over_frames(requests, self._num_frames, self._batch_size, score_batch))

    def _text_features(self, prompts: list[str]) -> torch.Tensor:
        """Unit text features (N, D), float32."""
        import torch

        parts = []
        for batch in batches(prompts, self._batch_size):
            tokens = self._processor.tokenizer(
                list(batch), padding=True, truncation=True, max_length=77, return_tensors="pt"
            )
            parts.append(unit_features(self._model.get_text_features(**tokens.to(self._device))))
        return torch.cat(parts)

    def _image_features(self, frames: list[Frame]) -> torch.Tensor:
        """Unit image features (N, D), float32."""
        pixels = self._processor.image_processor(images=frames, input_data_format="channels_last", return_tensors="pt")
        values = pixels["pixel_values"].to(self._device, self._dtype)
        return unit_features(self._model.get_image_features(pixel_values=values))
