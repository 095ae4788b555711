"""`aesthetic`: how good an image looks, whatever its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rewards.image.pixels import Frame
from rewards.image.torch_common import choose_device, mean_over_frames, unit_features
from rewards.request import RewardRequest, Score

if TYPE_CHECKING:
    import torch


class AestheticScorer:
    """LAION's aesthetic predictor: a linear stack on the unit CLIP image features; about 1 to 10.

    The head is `Linear(D, 1024), Linear(1024, 128), Linear(128, 64), Linear(64, 16), Linear(16, 1)` with dropout
    between and no activation, as in `sac+logos+ava1-l14-linearMSE.pth` (improved-aesthetic-predictor). A video scores
    the mean over its frames.

    Args:
        head_path: The head's state dict, keys `layers.0.weight` and so on.
        model_path: A checkpoint with `transformers.CLIPModel` weights and its image processor.
        batch_size: Frames a batch.
        num_frames: Frames of a video, evenly spaced; `None` scores every one.
        device: `cuda`, `cpu`, ...; by default the GPU if there is one.
    """

    def __init__(
        self,
        head_path: str | None = None,
        model_path: str = "openai/clip-vit-large-patch14",
        batch_size: int = 8,
        num_frames: int | None = None,
        device: str | None = None,
    ) -> None:
        if not head_path:
            raise ValueError("aesthetic needs head_path: the file sac+logos+ava1-l14-linearMSE.pth")
        import torch
        from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

        self._device = choose_device(device)
        self._processor = CLIPImageProcessor.from_pretrained(model_path)
        model: Any = CLIPVisionModelWithProjection.from_pretrained(model_path, dtype=torch.float32)
        self._model = model.eval().to(self._device)
        self._head = _head(torch.load(head_path, map_location="cpu", weights_only=True)).eval().to(self._device)
        self._batch_size, self._num_frames = batch_size, num_frames

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request.

        Raises:
            LabelError: A request without an image.
        """
        import torch

        def score_batch(frames: list[Frame], owners: list[int]) -> torch.Tensor:
            pixels = self._processor(images=frames, input_data_format="channels_last", return_tensors="pt")
            embeds = self._model(pixel_values=pixels["pixel_values"].to(self._device)).image_embeds
            return self._head(unit_features(embeds)).squeeze(-1).cpu()

        with torch.inference_mode():
            return list(mean_over_frames(requests, self._num_frames, self._batch_size, score_batch))


def _head(state: dict[str, Any]) -> torch.nn.Module:
    from torch.nn import Dropout, Linear, Sequential

    features = state["layers.0.weight"].shape[1]
    layers = Sequential(
        Linear(features, 1024), Dropout(0.2), Linear(1024, 128), Dropout(0.2), Linear(128, 64), Dropout(0.1),
        Linear(64, 16), Linear(16, 1),
    )  # fmt: skip
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in state.items()})
    return layers
