"""`pickscore`: human preference for an image given its prompt."""

from __future__ import annotations

from rewards.image.clip import ClipScorer


class PickScoreScorer(ClipScorer):
    """exp(logit_scale) · cos(image, prompt) / 26 (Kirstain et al. 2023, https://arxiv.org/abs/2305.01569).

    The division brings the raw logits, 0 to about 26, to about [0, 1]. A video scores the mean over its frames.

    Args:
        processor_path: The CLIP processor, e.g. `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`.
        model_path: The weights, e.g. `yuvalkirstain/PickScore_v1`.
        batch_size: Frames a batch.
        num_frames: Frames of a video, evenly spaced; `None` scores every one.
        device: `cuda`, `cpu`, ...; by default the GPU if there is one.
        dtype: Of the weights.
    """

    name = "pickscore"
    divisor = 26.0

    def __init__(
        self,
        processor_path: str | None = None,
        model_path: str | None = None,
        batch_size: int = 8,
        num_frames: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if not processor_path or not model_path:
            raise ValueError(
                "pickscore needs --pickscore-processor-path (e.g. laion/CLIP-ViT-H-14-laion2B-s32B-b79K) "
                "and --pickscore-model-path (e.g. yuvalkirstain/PickScore_v1)"
            )
        super().__init__(model_path, processor_path, batch_size, num_frames, device, dtype)
