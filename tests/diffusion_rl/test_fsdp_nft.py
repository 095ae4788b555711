"""DiffusionNFT through the trainer, against its paper in float64; the moving average and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pair_helpers import capture_gradients, full_weights, roll_out, start

from diffusion_rl.algorithms.nft_timesteps import drop_final_steps, drop_random_steps
from diffusion_rl.models.loading import load_component
from diffusion_rl.models.registry import get_family
from diffusion_rl.sample import Sample
from diffusion_rl.train_data import plan_pairs, rollout_advantages, samples_to_noised_rows

NFT: dict[str, Any] = {
    "loss_type": "nft",
    "use_ema": True,
    "rollout_weights": "ema",
    "diffusion_guidance_scale": 1.0,
    "clip_grad": 0.0,
}


class Args:
    diffusion_nft_num_dropped_timesteps = 2


@pytest.fixture(scope="module")
def samples(tiny_sd3_dir: Path) -> list[Sample]:
    return roll_out(tiny_sd3_dir, sde_type="ode", guidance_scale=1.0)


def rows_of(samples: list[Sample]) -> Any:
    return samples_to_noised_rows(samples, rollout_advantages(samples), drop_final_steps, Args(), seed=3)


def plan(rows: Any, **layout: Any) -> Any:
    return plan_pairs(rows, **({"dp_size": 1, "num_steps": 1, "micro_batch_size": 5} | layout))[0]


def reference(model: Any, old: Any, row: Any, beta: float) -> torch.Tensor:
    clean = torch.from_numpy(row["clean"]).double()
    generator = torch.Generator().manual_seed(row["seed"])
    t = row["sigma"]
    noisy = (1 - t) * clean + t * torch.randn(clean.shape, generator=generator).double()
    inputs = {
        "hidden_states": noisy[None],
        "timestep": torch.tensor([row["timestep"]], dtype=torch.float64),
        **{name: torch.from_numpy(value).double()[None] for name, value in row["conditions"].items()},
    }
    velocity = model(**inputs, return_dict=False)[0][0]
    with torch.no_grad():
        before = old(**inputs, return_dict=False)[0][0]
    r = min(max(max(-5.0, min(5.0, row["advantage"])) / 10.0 + 0.5, 0.0), 1.0)
    loss = torch.zeros((), dtype=torch.float64)
    for share, implied in (
        (r, beta * velocity + (1 - beta) * before),
        (1 - r, (1 + beta) * before - beta * velocity),
    ):
        error = noisy - t * implied - clean
        loss = loss + share * (error**2 / error.abs().mean().clamp(min=1e-5).detach()).mean()
    return 5.0 * loss / beta


def test_gradient_is_the_papers_on_and_off_policy(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    rows = rows_of(samples)
    beta = 0.5
    trainer = start(tiny_sd3_dir, diffusion_nft_beta=beta, lr=1e-3, ema_decay_init=0.9, ema_decay_flat_steps=9, **NFT)
    first = trainer.train(0, plan(rows))
    assert first["train/old_velocity_distance"] == 0.0  # the average is the actor before the first update
    assert first["train/ema_decay"] == 0.9
    assert trainer.ema is not None
    averages = {name: average.full_tensor() for name, average in trainer.ema.averages.items()}
    plain, old = (
        load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer", dtype=torch.float32) for _ in range(2)
    )
    plain.load_state_dict(full_weights(trainer), strict=False)
    old.load_state_dict(averages, strict=False)
    plain, old = plain.double(), old.double()
    flat = [row for sample in rows for row in sample]
    loss = torch.stack([reference(plain, old, row, beta) for row in flat]).mean()
    loss.backward()
    before = full_weights(trainer)
    seen = capture_gradients(trainer)
    metrics = trainer.train(1, plan(rows))
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/old_velocity_distance"] > 0
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(seen[name].double(), parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)
    for name, weight in full_weights(trainer).items():
        assert torch.equal(weight, before[name])  # the averages were only lent
    trainer.shutdown()


def test_average_is_published_saved_and_resumed(tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path) -> None:
    rows = rows_of(samples)
    settings = NFT | {"ema_decay_ramp": 0.1, "ref_mode": "ref", "diffusion_kl_beta": 0.1}
    whole = start(tiny_sd3_dir, **settings)
    start_weights = full_weights(whole)
    metrics = whole.train(0, plan(rows, num_steps=2))
    assert metrics["train/ema_decay"] == pytest.approx(0.2)  # two optimizer steps
    weights = full_weights(whole)
    name = "proj_out.weight"
    published = whole.published_tensors()[name].full_tensor().clone()
    torch.testing.assert_close(published, 0.2 * start_weights[name] + 0.8 * weights[name])
    assert not torch.equal(published, weights[name])
    whole.save(tmp_path)
    expected = whole.train(1, plan(rows))
    resumed = start(tiny_sd3_dir, **settings)
    resumed.load(tmp_path)
    assert torch.equal(resumed.published_tensors()[name].full_tensor(), published)
    assert resumed.train(1, plan(rows)) == expected
    whole.shutdown()
    resumed.shutdown()


def test_steps_and_noise_are_each_samples_own(samples: list[Sample]) -> None:
    rows = samples_to_noised_rows(samples, rollout_advantages(samples), drop_random_steps, Args(), seed=3)
    again = samples_to_noised_rows(samples[2:], rollout_advantages(samples)[2:], drop_random_steps, Args(), seed=3)
    assert [[row["seed"] for row in sample] for sample in rows[2:]] == [[r["seed"] for r in s] for s in again]
    assert len({row["seed"] for sample in rows for row in sample}) == 12
    assert all(len(sample) == 2 for sample in rows)
    assert len({tuple(row["sigma"] for row in sample) for sample in rows}) > 1
