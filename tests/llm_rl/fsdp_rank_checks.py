"""What each of several gloo ranks runs; the results of rank 0 are compared with a single rank's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fsdp_helpers import capture_gradients, full_weights, plan

from llm_rl.supervised import plan_pairs
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from llm_rl.trainers.fsdp.trainer import FsdpTrainer


@dataclass
class Scenario:
    """A trainer and the rollouts that it gets; with `pairs`, rows are chosen and rejected ones in turn."""

    name: str
    rollouts: list[list[dict]]
    settings: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    gradient_only: bool = True
    load: Path | None = None
    pairs: bool = False


def run_scenario(
    scenario: Scenario, model: Path, out: Path, rank: int = 0, world_size: int = 1, init_method: str | None = None
) -> dict[str, Any]:
    """Train; return metrics, gradient or weights, and what was published."""
    common = {"hf_checkpoint": model, "train_dtype": "fp32", "device": "cpu", "weight_decay": 0.1, "lr": 1e-3}
    trainer = FsdpTrainer(FsdpTrainerSettings(**(common | scenario.settings)), rank, world_size, init_method)
    info = trainer.init()
    assert (info.rank, info.world_size, info.dp_rank, info.dp_size) == (rank, world_size, rank, world_size)
    if scenario.load is not None:
        trainer.load(scenario.load)
    start = full_weights(trainer)
    gradient = capture_gradients(trainer) if scenario.gradient_only else {}
    split = plan_pairs if scenario.pairs else plan
    layout = {"dp_size": world_size, **({"num_steps": 1} if scenario.pairs else {}), **scenario.layout}
    metrics = [trainer.train(i, split(rows, **layout)[rank]) for i, rows in enumerate(scenario.rollouts)]
    names = tuple(meta.name for meta in trainer.weight_metadata())
    bucket = trainer.export_bucket(names, 0)
    assert (bucket is None) == (rank > 0)
    if not scenario.gradient_only:
        checkpoint = out / f"checkpoint.{scenario.name}.{world_size}"
        checkpoint.mkdir(exist_ok=True)
        trainer.save(checkpoint)
        trainer.save_hf(out / f"{scenario.name}.{world_size}")
    result = {
        "start": start,
        "metrics": metrics,
        "gradient": dict(gradient),
        "weights": full_weights(trainer),
        "names": names,
        "bytes": None if bucket is None else bucket.data.tobytes(),
    }
    trainer.shutdown()
    return result


def rank_main(rank: int, world_size: int, scenarios: list[Scenario], model: Path, out: Path) -> None:
    """Run all scenarios in one process, each in a process group of its own."""
    torch.set_num_threads(1)
    results = {}
    for scenario in scenarios:
        init_method = f"file://{out}/{scenario.name}.{world_size}.rendezvous"
        results[scenario.name] = run_scenario(scenario, model, out, rank, world_size, init_method)
        torch.save(results[scenario.name]["metrics"], out / f"metrics.{scenario.name}.{world_size}.{rank}.pt")
    if rank == 0:
        torch.save(results, out / f"results.{world_size}.pt")
