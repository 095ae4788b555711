"""What the diffusion benchmarks share: the tiny pipeline with drawn weights, a rollout of it, the pairs to train on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.presets.shapes import IMAGE_SIZE, all_scenes
from diffusion_rl.presets.tiny import DIRECTORY_NAME, write_pipeline
from diffusion_rl.sample import GenerateRequest, Sample, SamplingParams, fill_samples
from diffusion_rl.train_data import plan_pairs, rollout_advantages, samples_to_rows
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.training.plan import StepPlan

NUM_STEPS = 8
TRAINED_STEPS = (1, 2)
PARAMS = SamplingParams(num_steps=NUM_STEPS, height=IMAGE_SIZE, width=IMAGE_SIZE, guidance_scale=1.0)
PROMPTS = itertools.cycle(scene.caption() for scene in all_scenes())


def write_model(folder: str) -> Path:
    """The tiny preset's pipeline, untrained: what it computes is the same."""
    return write_pipeline(Path(folder) / DIRECTORY_NAME, vae_steps=0)


def roll_out(directory: Path, num_prompts: int, group_size: int) -> list[Sample]:
    """Groups of images with trajectories, and rewards drawn at random."""
    engine, rng = LocalEngine(directory), np.random.default_rng(0)
    samples: list[Sample] = []
    for group in range(num_prompts):
        members = [
            Sample(index=group * group_size + k, group_index=group, prompt=next(PROMPTS), reward=float(rng.normal()))
            for k in range(group_size)
        ]
        request = GenerateRequest(
            str(group), str(members[0].prompt), group_size, 42 + group * group_size, PARAMS, TRAINED_STEPS
        )
        fill_samples(members, request, engine.generate([request])[0])
        samples += members
    return samples


def plan(samples: list[Sample], micro_batch_size: int) -> list[StepPlan]:
    """One optimizer step over the pairs of all samples."""
    pairs = samples_to_rows(samples, rollout_advantages(samples))
    return plan_pairs(
        pairs,
        dp_size=1,
        num_steps=1,
        micro_batch_size_sample=max(1, micro_batch_size // len(TRAINED_STEPS)),
        micro_batch_size_tstep=len(TRAINED_STEPS),
    )[0]


def start_trainer(directory: Path, **settings: Any) -> FsdpTrainer:
    """A trainer of it in this process, in fp32."""
    trainer = FsdpTrainer(
        FsdpTrainerSettings(
            hf_checkpoint=directory,
            diffusion_forward_dtype="fp32",
            diffusion_height=IMAGE_SIZE,
            diffusion_width=IMAGE_SIZE,
            diffusion_guidance_scale=PARAMS.guidance_scale,
            lr=1e-5,
            **settings,
        )
    )
    trainer.init()
    return trainer
