"""The tiny preset's supervised warm-up: a pipeline that draws shapes, but follows its prompts only in part.

Autoencoder first, then the transformer by flow matching, through the same trainer that later reinforces it. Captions
have wrong words in them, so that the model learns pictures well and words half.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion_rl.models.family import ModelFamily
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.models.registry import get_family
from diffusion_rl.presets.shapes import IMAGE_SIZE, captioned_pictures
from diffusion_rl.presets.tiny import DIRECTORY_NAME, write_pipeline
from diffusion_rl.train_data import plan_pairs
from diffusion_rl.trainers.fsdp.batch import TrainRow
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer

STEPS_A_CALL = 10

Report = Callable[[str], None]


def warm_up(
    directory: Path,
    *,
    vae_steps: int = 600,
    num_steps: int = 1600,
    batch_size: int = 32,
    num_pictures: int = 4096,
    wrong_words: float = 0.3,
    lr: float = 2e-3,
    seed: int = 0,
    report: Report | None = None,
) -> float:
    """Train the tiny pipeline on captioned pictures and save it.

    Args:
        directory: Where it goes.
        vae_steps: Steps of the autoencoder.
        num_steps: Steps of the transformer.
        batch_size: Pictures a step.
        num_pictures: Different pictures.
        wrong_words: Probability of each word of a caption to be wrong.
        lr: Peak rate of the transformer; it falls to zero along a cosine.
        seed: Of weights, pictures and noise.
        report: Told now and then how far it is; default: a line on stderr.

    Returns:
        Mean loss of the last steps.
    """
    say = report or (lambda line: print(line, file=sys.stderr, flush=True))
    with tempfile.TemporaryDirectory() as folder:
        untrained = Path(folder) / DIRECTORY_NAME

        def told(step: int, error: float) -> None:
            if (step + 1) % 100 == 0:
                say(f"preparing the tiny pipeline: autoencoder, step {step + 1} of {vae_steps}, error {error:.3f}")

        write_pipeline(untrained, seed=seed, vae_steps=vae_steps, progress=told)
        family = get_family("sd3")
        rows = list(encoded_pictures(untrained, family, num_pictures, seed, wrong_words))
        settings = FsdpTrainerSettings(
            hf_checkpoint=untrained,
            diffusion_model_family=family.name,
            loss_type="sft_loss",
            diffusion_forward_dtype="fp32",
            diffusion_height=IMAGE_SIZE,
            diffusion_width=IMAGE_SIZE,
            lr=lr,
            lr_decay_style="cosine",
            lr_warmup_iters=min(20, num_steps // 4),
            lr_decay_iters=num_steps,
            seed=seed,
        )
        return _train(settings, rows, directory, num_steps=num_steps, batch_size=batch_size, seed=seed, say=say)


def encoded_pictures(
    checkpoint: Path, family: ModelFamily, count: int, seed: int, wrong_words: float
) -> Iterator[TrainRow]:
    """Drawn pictures as rows of latents and conditions; each caption is encoded once."""
    pipeline = load_pipeline(str(checkpoint), family)
    known: dict[str, dict[str, np.ndarray]] = {}
    chunk: list[tuple[str, np.ndarray]] = []
    for index, entry in enumerate(captioned_pictures(count, seed, wrong_words)):
        chunk.append(entry)
        if len(chunk) < 64 and index + 1 < count:
            continue
        with torch.inference_mode():
            images = torch.from_numpy(np.stack([picture for _, picture in chunk])) * 2.0 - 1.0
            latents = family.encode_images(pipeline.vae, images).numpy()
            for caption, _ in chunk:
                if caption not in known:
                    (conditions,) = family.encode_prompts(pipeline, [caption])
                    known[caption] = {name: value.numpy() for name, value in conditions.items()}
        for (caption, _), clean in zip(chunk, latents, strict=True):
            yield TrainRow(conditions=known[caption], clean=clean, trained=1.0)
        chunk = []


def _train(
    settings: FsdpTrainerSettings,
    rows: list[TrainRow],
    directory: Path,
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    say: Report,
) -> float:
    trainer = FsdpTrainer(settings)
    trainer.init()
    rng = np.random.default_rng(seed)
    loss, done = float("nan"), 0
    try:
        while done < num_steps:
            steps = min(STEPS_A_CALL, num_steps - done)
            batch: list[Any] = []
            for i in range(steps * batch_size):
                row: Any = dict(rows[rng.integers(len(rows))])
                noise_seed = (seed << 40) + done * batch_size + i
                batch.append([row | {"sample_index": i, "seed": noise_seed}])
            plans = plan_pairs(batch, dp_size=1, num_steps=steps, micro_batch_size=batch_size)
            loss = trainer.train(done, plans[0])["train/loss"]
            done += steps
            if done % 100 == 0:
                say(f"preparing the tiny pipeline: transformer, step {done} of {num_steps}, loss {loss:.3f}")
        trainer.save_hf(directory)
    finally:
        trainer.shutdown()
    return loss
