"""PickScore, CLIP, HPS and the aesthetic head: tiny random checkpoints in the real formats, through the real loading
code, against the formula worked out here from the models' own features."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards import LabelError, RewardRequest, score
from tests.rewards.image_helpers import random_image

torch = pytest.importorskip("torch", reason="the extra tandem-rewards[clip] is not installed")
transformers = pytest.importorskip("transformers", reason="the extra tandem-rewards[clip] is not installed")
open_clip = pytest.importorskip("open_clip", reason="the extra tandem-rewards[clip] is not installed")

PROMPTS = ["a cat", "the red dog on a mat", "a cat " * 60]
SIZE, DIM = 32, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `CLIPModel` and `CLIPProcessor` save it, with CLIP-H's layout at tiny size."""
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {**shared, "vocab_size": 49408, "projection_dim": DIM, "max_position_embeddings": 77}
    vision = {**shared, "image_size": SIZE, "patch_size": 8, "projection_dim": DIM}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=DIM)
    transformers.CLIPModel(config).save_pretrained(path)
    bpe = open_clip.tokenizer.SimpleTokenizer()  # the byte-pair vocabulary ships with open_clip
    vocabulary = dict(bpe.encoder)
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair, _ in sorted(bpe.bpe_ranks.items(), key=lambda item: item[1])]
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    begin, end = list(bpe.encoder)[-2:]
    names = {"bos_token": begin, "eos_token": end, "unk_token": end}
    tokenizer = transformers.CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt"), pad_token=end, **names)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    transformers.CLIPProcessor(processor, tokenizer).save_pretrained(path)
    return path


def requests(count: int = 3) -> list[RewardRequest]:
    return [RewardRequest(prompt=PROMPTS[i % 3], image=random_image(i, 40)) for i in range(count)]


def cosine(path: Path, prompt: str, image: np.ndarray) -> tuple[float, float]:
    """Cosine and exp(logit_scale), one pair at a time, from `CLIPModel`'s own joint forward pass."""
    model = transformers.CLIPModel.from_pretrained(path).eval()
    processor = transformers.CLIPProcessor.from_pretrained(path)
    inputs = processor(text=[prompt], images=[image], return_tensors="pt", truncation=True, max_length=77, padding=True)
    with torch.no_grad():
        output = model(**inputs)
    text, picture = output.text_embeds[0].double(), output.image_embeds[0].double()
    return float(text @ picture / (text.norm() * picture.norm())), math.exp(float(model.logit_scale))


@pytest.mark.parametrize(("name", "divisor"), [("pickscore", 26.0), ("clip", 30.0)])
def test_clip_scores_are_scaled_cosines(checkpoint: Path, name: str, divisor: float) -> None:
    options: dict[str, Any] = {"model_path": str(checkpoint), "processor_path": str(checkpoint), "batch_size": 2}
    scores = score(requests(), name, options={name: options})
    for request, value in zip(requests(), scores, strict=True):
        similarity, scale = cosine(checkpoint, request.prompt or "", request.image)
        assert value == pytest.approx(scale * similarity / divisor, abs=1e-5)
    assert len(set(scores)) == 3


def test_batches_do_not_change_scores(checkpoint: Path) -> None:
    paths = {"model_path": str(checkpoint), "processor_path": str(checkpoint)}
    many, one = (
        score(requests(5), "pickscore", options={"pickscore": {**paths, "batch_size": size}}) for size in (5, 1)
    )
    assert many == pytest.approx(one, abs=1e-6)


def test_pickscore_of_a_video_is_the_mean_of_its_frames(checkpoint: Path) -> None:
    paths = {"model_path": str(checkpoint), "processor_path": str(checkpoint), "num_frames": 2}
    frames = [random_image(i, 40) for i in range(3)]
    video = score([RewardRequest(prompt="a cat", image=frames)], "pickscore", options={"pickscore": paths})[0]
    ends = score(
        [RewardRequest(prompt="a cat", image=frame) for frame in (frames[0], frames[2])],
        "pickscore",
        options={"pickscore": paths},
    )
    assert video == pytest.approx(sum(ends) / 2, abs=1e-6)  # type: ignore[arg-type]


def test_odd_images_have_finite_scores(checkpoint: Path) -> None:
    paths = {"model_path": str(checkpoint), "processor_path": str(checkpoint)}
    odd = [np.zeros((1, 1, 3)), np.full((3, 9, 9), np.nan), np.zeros((20, 20)), np.zeros((20, 20, 4), np.uint8)]
    batch = [RewardRequest(prompt="x", image=image) for image in odd]
    assert all(math.isfinite(value) for value in score(batch, "pickscore", options={"pickscore": paths}))  # type: ignore[arg-type]


def test_missing_paths_name_the_flags() -> None:
    with pytest.raises(ValueError, match="--pickscore-processor-path"):
        score(requests(1), "pickscore")
    with pytest.raises(ValueError, match="head_path"):
        score(requests(1), "aesthetic")
    with pytest.raises(ValueError, match="--hps-version"):
        score(requests(1), "hps", options={"hps": {"version": "v3"}})


def test_a_missing_prompt_names_the_sample(checkpoint: Path) -> None:
    paths = {"model_path": str(checkpoint), "processor_path": str(checkpoint)}
    with pytest.raises(LabelError, match="sample 0 has no prompt"):
        score([RewardRequest(image=random_image(0))], "pickscore", options={"pickscore": paths})


@pytest.mark.parametrize("wrapped", [True, False])
def test_hps_is_the_product_of_unit_features(tmp_path: Path, wrapped: bool) -> None:
    vision = {"image_size": SIZE, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (tmp_path / "tiny-hps.json").write_text(json.dumps({"embed_dim": DIM, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(tmp_path)
    torch.manual_seed(1)
    model = open_clip.create_model("tiny-hps").eval()
    state = model.state_dict()
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "hps.pt")
    options = {"checkpoint_path": str(tmp_path / "hps.pt"), "model_name": "tiny-hps", "batch_size": 2}
    scores = score(requests(), "hps", options={"hps": options})

    from PIL import Image

    transform = open_clip.image_transform(SIZE, is_train=False)
    tokenizer = open_clip.get_tokenizer("tiny-hps")
    for request, value in zip(requests(), scores, strict=True):
        with torch.no_grad():
            image = model.encode_image(transform(Image.fromarray(request.image))[None])[0].double()
            prompt = model.encode_text(tokenizer([request.prompt]))[0].double()
        assert value == pytest.approx(float(image @ prompt / (image.norm() * prompt.norm())), abs=1e-5)
    with pytest.raises(LabelError, match="sample 0 is a video of 2 frames, and hps scores images"):
        score([RewardRequest(prompt="x", image=[random_image(0)] * 2)], "hps", options={"hps": options})


def test_aesthetic_is_the_linear_stack_on_unit_features(checkpoint: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = [(0, DIM, 1024), (2, 1024, 128), (4, 128, 64), (6, 64, 16), (7, 16, 1)]
    state = {f"layers.{i}.weight": torch.randn(b, a, generator=generator) / a**0.5 for i, a, b in sizes}
    state |= {f"layers.{i}.bias": torch.randn(b, generator=generator) for i, _, b in sizes}
    torch.save(state, tmp_path / "head.pth")
    options = {"head_path": str(tmp_path / "head.pth"), "model_path": str(checkpoint)}
    scores = score(requests(2), "aesthetic", options={"aesthetic": options})

    model = transformers.CLIPModel.from_pretrained(checkpoint).eval()
    processor = transformers.CLIPImageProcessor.from_pretrained(checkpoint)
    for request, value in zip(requests(2), scores, strict=True):
        with torch.no_grad():
            hidden = model.vision_model(**processor(images=[request.image], return_tensors="pt")).pooler_output
            features = model.visual_projection(hidden)[0].double()
        features /= features.norm()
        for i, _, _ in sizes:
            features = state[f"layers.{i}.weight"].double() @ features + state[f"layers.{i}.bias"].double()
        assert value == pytest.approx(float(features), abs=1e-4)
