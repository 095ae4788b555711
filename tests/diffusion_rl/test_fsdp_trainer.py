"""The trainer on real rollouts of the tiny pipeline: parity, gradients, references, checkpoints, exports."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pair_helpers import capture_gradients, full_weights, pairs_of, roll_out, start
from torch import Tensor

from diffusion_rl.models.loading import load_component
from diffusion_rl.models.registry import get_family
from diffusion_rl.sample import Sample
from diffusion_rl.train_data import plan_pairs, rollout_advantages, samples_to_rows, tiled
from diffusion_rl.trainers.fsdp.loss import output_differences
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.weight_sync.bucket import unpack


@pytest.fixture(scope="module")
def samples(tiny_sd3_dir: Path) -> list[Sample]:
    return roll_out(tiny_sd3_dir)


def plan(pairs: Any, **layout: Any) -> Any:
    return plan_pairs(pairs, **({"dp_size": 1, "num_steps": 1, "micro_batch_size": 6} | layout))[0]


def reference_loss(model: torch.nn.Module, row: Any, *, eta: float = 0.7, scale: float = 2.0) -> Tensor:
    """Flow-GRPO's loss of one pair, written out from the paper in float64."""
    latents = torch.from_numpy(row["latents"]).double()
    both = [
        model(
            hidden_states=latents[None],
            timestep=torch.tensor([row["timestep"]], dtype=torch.float64),
            **{name: torch.from_numpy(value).double()[None] for name, value in row[which].items()},
            return_dict=False,
        )[0][0]
        for which in ("conditions", "negative_conditions")
    ]
    velocity = both[1] + scale * (both[0] - both[1])
    sigma, after = row["sigma"], row["next_sigma"]
    dt = after - sigma
    s = eta * (sigma / (1 - (row["sigma_max"] if sigma == 1.0 else sigma))) ** 0.5
    mean = latents * (1 + s**2 / (2 * sigma) * dt) + velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    step = torch.distributions.Normal(mean, s * (-dt) ** 0.5)
    ratio = (step.log_prob(torch.from_numpy(row["next_latents"]).double()).mean() - row["log_prob"]).exp()
    advantage = max(-5.0, min(5.0, row["advantage"]))
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4))


def test_before_the_first_update_the_ratio_is_one(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    trainer = start(tiny_sd3_dir, debug_skip_optimizer_step=True)
    before = full_weights(trainer)
    metrics = trainer.train(0, plan(pairs_of(samples)))
    assert metrics["train/ratio_abs_minus_1"] < 1e-6
    assert metrics["train/log_prob_mean_abs_diff"] < 1e-6
    assert metrics["train/model_output_max_abs_diff"] < 1e-4
    assert metrics["train/model_output_rel_max"] < 1e-4
    assert metrics["train/model_output_mean_abs_diff"] <= metrics["train/model_output_max_abs_diff"]
    assert "train/grad_norm" not in metrics
    for name, weight in full_weights(trainer).items():
        assert torch.equal(weight, before[name])
    trainer.shutdown()


def test_how_far_two_velocities_are_apart() -> None:
    ours, theirs = torch.tensor([[1.0, 2.0, -3.0]]), torch.tensor([[1.5, 2.0, -4.0]])
    assert [float(value) for value in output_differences(ours, theirs)] == [1.5, 1.0, 0.25]


def test_gradient_is_the_papers(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    """However the pairs are cut into micro-batches; with log-probs of another policy, so that some ratios clip."""
    pairs = pairs_of(samples)
    for k, row in enumerate(row for rows in pairs for row in rows):
        row["log_prob"] += (-1) ** k * 4e-5 * (k % 4)
    rows = [row for sample in pairs for row in sample]
    plain = load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer", dtype=torch.float32).double()
    loss = torch.stack([reference_loss(plain, row) for row in rows]).mean()
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    layouts = [{"micro_batch_size": 5}, {"micro_batch_size_sample": 3, "micro_batch_size_tstep": 2}]
    for layout in layouts:
        trainer = start(tiny_sd3_dir)
        seen = capture_gradients(trainer)
        metrics = trainer.train(0, plan(pairs, **layout))
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert 0 < metrics["train/pg_clipfrac"] < 1
        for name, gradient in expected.items():
            torch.testing.assert_close(seen[name].double(), gradient, rtol=2e-3, atol=2e-4 * norm)
        trainer.shutdown()


def test_pairs_are_exactly_what_was_sampled(samples: list[Sample]) -> None:
    pairs = pairs_of(samples)
    for sample, rows in zip(samples, pairs, strict=True):
        trajectory = sample.trajectory
        assert trajectory is not None
        assert [row["timestep"] for row in rows] == [trajectory.timesteps[i] for i in (0, 1, 3)]
        for row, step in zip(rows, (0, 1, 3), strict=True):
            assert np.array_equal(row["next_latents"], trajectory.latent(step + 1))
            assert row["sigma"] == trajectory.sigmas[step]
    rewards = [sample.scalar_reward() for sample in samples[:3]]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    assert [rows[0]["advantage"] for rows in pairs[:3]] == pytest.approx(expected.tolist())


def test_tiles(samples: list[Sample]) -> None:
    rows = tiled(pairs_of(samples), 2, 2)
    cuts, position = [], 0
    for size in (4, 2) * 3:
        cuts.append([(row["sample_index"], row["sigma"]) for row in rows[position : position + size]])
        position += size
    sigmas = [row["sigma"] for row in pairs_of(samples)[0]]
    assert cuts[0] == [(0, sigmas[0]), (0, sigmas[1]), (1, sigmas[0]), (1, sigmas[1])]
    assert cuts[1] == [(0, sigmas[2]), (1, sigmas[2])]
    assert len({id(row) for row in rows}) == len(rows) == 18


def test_removed_samples_and_ranks_without_rows(samples: list[Sample], tiny_sd3_dir: Path) -> None:
    marked = copy.copy(samples[0])
    marked.remove_sample = True
    pairs = samples_to_rows([marked, *samples[1:]], rollout_advantages(samples))
    kept = pairs_of(samples)[1:]
    gradients = []
    for chosen in (pairs, kept):
        trainer = start(tiny_sd3_dir)
        seen = capture_gradients(trainer)
        trainer.train(0, plan(chosen))
        gradients.append(dict(seen))
        trainer.shutdown()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)
    idle = plan_pairs(pairs_of(samples)[:1], dp_size=4, num_steps=1)[0][0]  # three pairs for four ranks
    assert idle.micro_batches == [[0]]
    assert idle.rows[0]["trained"] == 0.0


def test_reference_kl(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    """Zero while the weights are the reference's; afterwards it is there and pulls back."""
    trainer = start(tiny_sd3_dir, ref_mode="ref", diffusion_kl_beta=0.5, lr=1e-2)
    first = trainer.train(0, plan(pairs_of(samples)))
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    second = trainer.train(1, plan(pairs_of(samples)))
    assert second["train/kl_loss"] > 1e-4
    assert second["train/loss"] == pytest.approx(second["train/pg_loss"] + 0.5 * second["train/kl_loss"], rel=1e-5)
    trainer.shutdown()


def test_grpo_guard_has_ratio_one_too_and_another_gradient(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    norms = []
    for guard in (False, True):
        trainer = start(tiny_sd3_dir, diffusion_grpo_guard=guard)
        capture_gradients(trainer)
        metrics = trainer.train(0, plan(pairs_of(samples)))
        assert metrics["train/ratio_abs_minus_1"] < 1e-6
        norms.append(metrics["train/grad_norm"])
        trainer.shutdown()
    assert norms[0] != pytest.approx(norms[1], rel=0.01)


def test_resume_is_exact_and_exports_what_was_trained(
    tiny_sd3_dir: Path, samples: list[Sample], tmp_path: Path
) -> None:
    pairs = pairs_of(samples)
    whole = start(tiny_sd3_dir)
    whole.train(0, plan(pairs))
    whole.save(tmp_path)
    expected = whole.train(1, plan(pairs, num_steps=2))
    resumed = start(tiny_sd3_dir)
    resumed.load(tmp_path)
    assert resumed.train(1, plan(pairs, num_steps=2)) == expected
    weights = full_weights(whole)
    for name, weight in full_weights(resumed).items():
        assert torch.equal(weight, weights[name])
    names = tuple(meta.name for meta in whole.weight_metadata())
    bucket = whole.export_bucket(names, 0)
    for meta, tensor in unpack(bucket):
        assert torch.equal(tensor, weights[meta.name])
    target = tmp_path / "sd3-exported"
    whole.save_hf(target)
    exported = load_component(str(target), get_family("sd3"), "transformer", dtype=torch.float32)
    for name, weight in exported.named_parameters():
        assert torch.equal(weight.detach(), weights[name])
    whole.shutdown()
    resumed.shutdown()


def test_supervised_loss_is_flow_matching(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    """In expectation over many noise levels: an independent estimate on the same pictures, with its own draws."""
    rows = [
        {"sample_index": k, "conditions": s.conditions, "trained": 1.0, "clean": s.trajectory.clean, "seed": k}
        for k, s in enumerate(roll_out(tiny_sd3_dir, sde_type="ode"))
        if s.trajectory is not None and s.conditions is not None
    ]
    many: list[Any] = [
        dict(row, seed=1000 * r + row["seed"], sample_index=r * 6 + i) for r in range(40) for i, row in enumerate(rows)
    ]
    trainer = start(tiny_sd3_dir, loss_type="sft_loss", fsdp_flow_shift=3.0)
    capture_gradients(trainer)
    measured = trainer.train(0, plan([[row] for row in many], micro_batch_size=60))["train/loss"]
    repeated = trainer.train(0, plan([[row] for row in many], micro_batch_size=120))["train/loss"]
    trainer.shutdown()
    assert repeated == pytest.approx(measured, rel=1e-5)
    plain = load_component(str(tiny_sd3_dir), get_family("sd3"), "transformer", dtype=torch.float32)
    generator, errors = torch.Generator().manual_seed(5), []
    for _ in range(40):
        clean = torch.from_numpy(np.stack([row["clean"] for row in rows]))
        u = torch.sigmoid(torch.randn(len(rows), generator=generator))
        sigma = (3.0 * u / (1.0 + 2.0 * u)).view(-1, 1, 1, 1)
        noise = torch.randn(clean.shape, generator=generator)
        with torch.no_grad():
            velocity = plain(
                hidden_states=(1 - sigma) * clean + sigma * noise,
                timestep=1000 * sigma.flatten(),
                **get_family("sd3").collate_conditions(
                    [{name: torch.from_numpy(v) for name, v in row["conditions"].items()} for row in rows]
                ),
                return_dict=False,
            )[0]
        errors.append(((velocity - (noise - clean)) ** 2).mean())
    errors = torch.stack(errors)
    assert measured == pytest.approx(errors.mean().item(), abs=4 * (2 / 40) ** 0.5 * errors.std().item())


def test_recomputed_activations_give_the_same_gradient(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    found = []
    for recompute in (False, True):
        trainer = start(tiny_sd3_dir, gradient_checkpointing=recompute)
        assert trainer.model.is_gradient_checkpointing == recompute
        seen = capture_gradients(trainer)
        trainer.train(0, plan(pairs_of(samples)))
        found.append(dict(seen))
        trainer.shutdown()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-8)


def test_asleep_it_does_not_train_and_awake_it_goes_on(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    pairs, found = pairs_of(samples), []
    for nap in (False, True):
        trainer = start(tiny_sd3_dir)
        trainer.train(0, plan(pairs))
        if nap:
            trainer.sleep()
            with pytest.raises(RuntimeError, match="call wake_up before train"):
                trainer.train(1, plan(pairs))
            trainer.wake_up()
        found.append(trainer.train(1, plan(pairs)))
        trainer.shutdown()
    assert found[0] == found[1]


def test_settings_that_do_not_fit(tiny_sd3_dir: Path) -> None:
    settings = FsdpTrainerSettings(hf_checkpoint=tiny_sd3_dir)
    for changes, message in (
        ({"diffusion_kl_beta": 0.1}, "ref_mode none"),
        ({"diffusion_sde_type": "ode"}, "no log-probs"),
        ({"lr_decay_style": "cosine"}, "lr_decay_iters"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(settings, **changes).check()


def test_a_log_prob_that_is_not_finite_names_its_sample(tiny_sd3_dir: Path, samples: list[Sample]) -> None:
    pairs = pairs_of(samples)
    pairs[2][0]["log_prob"] = float("nan")
    trainer = start(tiny_sd3_dir)
    with pytest.raises(ValueError, match="sample 2: log_prob"):
        trainer.train(0, plan(pairs))
    trainer.shutdown()
