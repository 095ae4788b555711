"""Rollouts of a tiny pipeline, trainers on them, and what each of several gloo ranks runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion_rl.engines.local import LocalEngine
from diffusion_rl.sample import GenerateRequest, Sample, SamplingParams, fill_samples
from diffusion_rl.train_data import plan_pairs, rollout_advantages, samples_to_rows
from diffusion_rl.trainers.fsdp.batch import TrainRow
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer
from shared_runtime.weight_sync.bucket import unpack

PROMPTS = ("a small red circle at the top left", "a large blue square at the bottom right")
STEPS, WINDOW = 4, (0, 1, 3)
SETTINGS: dict[str, Any] = {
    "diffusion_forward_dtype": "fp32",
    "device": "cpu",
    "lr": 1e-3,
    "diffusion_height": 64,
    "diffusion_width": 64,
    "diffusion_guidance_scale": 2.0,
}


def roll_out(
    model: Path, *, group: int = 3, version: int = 0, engine: LocalEngine | None = None, **params: Any
) -> list[Sample]:
    """Samples of a real rollout with rewards, of an fp32 engine unless one is given."""
    engine = engine or LocalEngine(model, weight_version=version)
    sampling = SamplingParams(
        **({"num_steps": STEPS, "height": 64, "width": 64, "guidance_scale": 2.0, "debug": True} | params)
    )
    samples: list[Sample] = []
    for g, prompt in enumerate(PROMPTS):
        members = [Sample(index=g * group + k, group_index=g, prompt=prompt) for k in range(group)]
        request = GenerateRequest(str(g), prompt, group, 100 * g, sampling, sde_steps=WINDOW)
        fill_samples(members, request, engine.generate([request])[0])
        samples += members
    for sample in samples:
        sample.reward = float(np.random.default_rng(sample.index).normal())
    return samples


def pairs_of(samples: list[Sample]) -> list[list[TrainRow]]:
    """Their training pairs."""
    return samples_to_rows(samples, rollout_advantages(samples))


def start(model: Path, rank: int = 0, world_size: int = 1, init_method: str | None = None, **changes: Any) -> Any:
    """A started fp32 trainer on the CPU."""
    settings = FsdpTrainerSettings(hf_checkpoint=model, **(SETTINGS | changes))
    trainer = FsdpTrainer(settings, rank, world_size, init_method)
    trainer.init()
    return trainer


def full_weights(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model.named_parameters()}


def capture_gradients(trainer: FsdpTrainer) -> dict[str, torch.Tensor]:
    """Make the trainer's next optimizer step record the gradient instead of applying it; a live dict."""
    seen: dict[str, torch.Tensor] = {}

    def record(*args: Any, **kwargs: Any) -> None:
        for name, p in trainer.model.named_parameters():
            if p.grad is not None:
                seen[name] = p.grad.full_tensor().detach().clone()

    trainer.optimizer.step = record  # type: ignore[method-assign]
    trainer.schedule.step = lambda: None  # type: ignore[method-assign]
    return seen


def run_case(
    model: Path, case: dict[str, Any], out: Path, rank: int = 0, world_size: int = 1, init_method: str | None = None
) -> dict[str, Any]:
    """Gradient and metrics of one rollout; with `updates`, a name, weights and a checkpoint after it instead."""
    trainer = start(model, rank, world_size, init_method, clip_grad=0.0, **case.get("settings", {}))
    gradient = {} if case.get("updates") else capture_gradients(trainer)
    plans = plan_pairs(case["pairs"], dp_size=world_size, **({"num_steps": 1} | case.get("layout", {})))
    metrics = trainer.train(0, plans[rank])
    names = tuple(meta.name for meta in trainer.weight_metadata())
    bucket = trainer.export_bucket(names, 0)
    assert (bucket is None) == (rank > 0)
    if case.get("updates"):
        checkpoint = out / f"{case['updates']}.{world_size}"
        checkpoint.mkdir(exist_ok=True)
        trainer.save(checkpoint)
    result = {"metrics": metrics, "gradient": dict(gradient), "weights": full_weights(trainer)}
    result["published"] = {} if bucket is None else {meta.name: tensor.clone() for meta, tensor in unpack(bucket)}
    trainer.shutdown()
    return result


def rank_main(rank: int, world_size: int, model: Path, cases: dict[str, dict[str, Any]], out: Path) -> None:
    """All cases on one rank, each in a process group of its own."""
    torch.set_num_threads(1)
    results = {
        name: run_case(model, case, out, rank, world_size, f"file://{out}/{name}.rendezvous")
        for name, case in cases.items()
    }
    torch.save(results, out / f"results.{rank}.pt")
