"""The in-process engine against diffusers' pipelines, and as an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_rl.algorithms.step_dynamics import FlowSde
from diffusion_rl.engines.local import LocalEngine, RequestError
from diffusion_rl.models.family import Guidance
from diffusion_rl.models.forward import predict_velocity
from diffusion_rl.models.registry import get_family
from diffusion_rl.sample import GenerateRequest, Sample, SamplingParams, fill_samples
from shared_runtime.weight_sync.bucket import pack, plan_buckets, tensor_meta
from shared_runtime.weight_sync.receiver import WeightUpdateError

PROMPT = "a small red circle at the top left"
PARAMS = SamplingParams(num_steps=4, height=64, width=64, guidance_scale=4.0)
REQUEST = GenerateRequest("r0", PROMPT, 3, 1000, PARAMS, sample_ids=(40, 41, 42))


@pytest.fixture
def engine(tiny_sd3_dir: Path) -> LocalEngine:
    return LocalEngine(tiny_sd3_dir)


def change(request: GenerateRequest, **params: Any) -> GenerateRequest:
    return replace(request, params=replace(request.params, **params))


def one(engine: LocalEngine, request: GenerateRequest) -> Any:
    return engine.generate([request])[0]


@pytest.mark.parametrize("guidance_scale", [4.0, 1.0])
def test_ode_images_are_those_of_the_sd3_pipeline(engine: LocalEngine, guidance_scale: float) -> None:
    got = one(engine, change(REQUEST, sde_type="ode", guidance_scale=guidance_scale)).images
    expected = engine.pipeline(
        prompt=PROMPT,
        num_images_per_prompt=3,
        num_inference_steps=4,
        guidance_scale=guidance_scale,
        height=64,
        width=64,
        max_sequence_length=12,
        generator=[torch.Generator().manual_seed(1000 + k) for k in range(3)],
        output_type="np",
    ).images
    np.testing.assert_array_equal(got, expected.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("guided", [True, False])
def test_ode_images_are_those_of_the_qwen_pipeline(tiny_qwen_dir: Path, tiny_qwen: Any, guided: bool) -> None:
    engine = LocalEngine(tiny_qwen_dir)
    request = GenerateRequest(
        "q", "a cat", 2, 7, replace(PARAMS, sde_type="ode", true_cfg_scale=4.0 if guided else 1.0, negative_prompt="no")
    )
    got = one(engine, request).images
    expected = tiny_qwen(
        prompt="a cat",
        negative_prompt="no" if guided else None,
        true_cfg_scale=4.0 if guided else 1.0,
        num_images_per_prompt=2,
        num_inference_steps=4,
        height=64,
        width=64,
        generator=[torch.Generator().manual_seed(7 + k) for k in range(2)],
        output_type="np",
    ).images
    np.testing.assert_array_equal(got, expected.transpose(0, 3, 1, 2))


def test_noise_level_zero_gives_the_ode_image(engine: LocalEngine) -> None:
    ode = one(engine, change(REQUEST, sde_type="ode")).images
    np.testing.assert_array_equal(one(engine, change(REQUEST, noise_level=0.0)).images, ode)
    assert np.abs(one(engine, REQUEST).images - ode).max() > 0.01


def test_the_same_request_is_bit_identical_whatever_else_is_in_the_call(engine: LocalEngine) -> None:
    first = one(engine, REQUEST)
    other = replace(REQUEST, request_id="r1", prompt="a large blue square", num_outputs=2, seed=5, sample_ids=())
    _, again = engine.generate([other, REQUEST])
    np.testing.assert_array_equal(first.images, again.images)
    for a, b in zip(first.trajectories, again.trajectories, strict=True):
        np.testing.assert_array_equal(a.latents, b.latents)
        np.testing.assert_array_equal(a.log_probs, b.log_probs)


def test_image_k_uses_seed_plus_k(engine: LocalEngine) -> None:
    group = one(engine, REQUEST)
    for k in range(3):
        alone = one(engine, replace(REQUEST, num_outputs=1, seed=1000 + k, sample_ids=(40 + k,)))
        np.testing.assert_array_equal(alone.trajectories[0].latent(0), group.trajectories[k].latent(0))
        np.testing.assert_allclose(alone.images[0], group.images[k], atol=1e-4)
    assert np.abs(group.images[0] - group.images[1]).max() > 0.01


def test_a_trainer_that_replays_the_trajectory_finds_ratio_one(engine: LocalEngine) -> None:
    """From the arrays alone: conditions, latents, sigmas, timesteps."""
    family, output = get_family("sd3"), one(engine, change(REQUEST, debug=True))

    def batch(conditions: Any) -> dict[str, torch.Tensor]:
        return family.collate_conditions([{k: torch.from_numpy(v) for k, v in conditions.items()}] * 3)

    grid = output.trajectories[0].sigmas
    for k, step in enumerate(output.trajectories[0].sde_steps):
        latents, following = (
            torch.from_numpy(np.stack([t.latent(i) for t in output.trajectories])) for i in (step, step + 1)
        )
        with torch.no_grad():
            velocity = predict_velocity(
                family,
                engine.pipeline.transformer,
                latents,
                torch.full((3,), float(output.trajectories[0].timesteps[step])),
                batch(output.conditions),
                batch(output.negative_conditions),
                Guidance(4.0),
                extra={},
            )
        recorded = np.stack([t.model_outputs[k] for t in output.trajectories])
        assert np.abs(velocity.numpy() - recorded).max() < 1e-6
        sigma, next_sigma = (torch.full((3,), float(grid[i])) for i in (step, step + 1))
        transition = FlowSde().transition(
            latents, velocity, sigma, next_sigma, sigma_max=torch.full((3,), float(grid[1])), noise_level=0.7
        )
        old = torch.from_numpy(np.array([t.log_probs[k] for t in output.trajectories]))
        ratio = torch.exp(FlowSde().log_prob(following, transition) - old)
        assert (ratio - 1).abs().max() < 1e-6


def test_windows_and_returned_latents(engine: LocalEngine) -> None:
    output = one(engine, replace(REQUEST, sde_steps=(1, 2), return_steps=(1, 2, 3)))
    trajectory = output.trajectories[0]
    assert trajectory.sde_steps == (1, 2)
    assert trajectory.log_probs.shape == (2,)
    assert trajectory.latent_indices == (1, 2, 3)
    with pytest.raises(KeyError, match="did not return latents 4"):
        _ = trajectory.clean
    assert trajectory.sigmas.dtype == trajectory.latents.dtype == trajectory.log_probs.dtype == np.float32


def test_conditions(engine: LocalEngine) -> None:
    output = one(engine, REQUEST)
    assert output.conditions["encoder_hidden_states"].shape == (24, 64)
    assert output.negative_conditions is not None
    assert one(engine, change(REQUEST, guidance_scale=1.0)).negative_conditions is None
    kept = one(engine, change(REQUEST, guidance_scale=1.0, return_negative_conditions=True)).negative_conditions
    np.testing.assert_array_equal(kept["pooled_projections"], output.negative_conditions["pooled_projections"])


def test_a_prompt_is_encoded_once(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    original = type(engine.family).encode_prompts

    def counting(self: Any, pipeline: Any, prompts: list[str]) -> Any:
        encoded.extend(prompts)
        return original(self, pipeline, prompts)

    monkeypatch.setattr(type(engine.family), "encode_prompts", counting)
    engine.generate([REQUEST, replace(REQUEST, seed=7)])
    assert encoded == [PROMPT, ""]


def test_samples_are_filled_in_order(engine: LocalEngine) -> None:
    samples = [Sample(index=40 + k, group_index=3, prompt=PROMPT) for k in range(3)]
    output = one(engine, REQUEST)
    fill_samples(samples, REQUEST, output)
    assert [s.seed for s in samples] == [1000, 1001, 1002]
    np.testing.assert_array_equal(samples[2].generated_output, output.images[2])
    assert samples[0].weight_version_returned == 0
    with pytest.raises(ValueError, match="does not fit request"):
        fill_samples(samples[:2], REQUEST, output)


def publish(engine: LocalEngine, tensors: dict[str, torch.Tensor], version: int) -> Any:
    metas = [tensor_meta(name, tensor) for name, tensor in tensors.items()]
    engine.pause()
    engine.flush_cache()
    engine.begin_update(version, metas)
    for index, names in enumerate(plan_buckets(metas, 1 << 20)):
        engine.apply_bucket(pack(index, [(name, tensors[name]) for name in names]))
    report = engine.end_update()
    engine.resume()
    return report


def test_a_weight_update_changes_the_images_and_the_version(engine: LocalEngine) -> None:
    before = one(engine, REQUEST)
    old = {name: tensor.clone() for name, tensor in engine.named_tensors().items()}
    new = {name: tensor * 1.05 for name, tensor in old.items()}
    checksums = engine.weight_checksums()
    report = publish(engine, new, 7)
    assert report.num_tensors == len(old)
    after = one(engine, REQUEST)
    assert (before.weight_version, after.weight_version) == (0, 7)
    assert np.abs(after.images - before.images).max() > 1e-3
    assert all(engine.weight_checksums()[name] != digest for name, digest in checksums.items() if new[name].any())
    publish(engine, old, 8)
    np.testing.assert_array_equal(one(engine, REQUEST).images, before.images)
    assert engine.health()["weight_version"] == 8


def test_names_that_the_engine_lacks_are_an_error_and_change_nothing(engine: LocalEngine) -> None:
    tensors = {f"base_model.model.{name}": tensor for name, tensor in engine.named_tensors().items()}
    with pytest.raises(WeightUpdateError, match="unknown to the engine: base_model"):
        publish(engine, tensors, 1)
    engine.resume()
    assert one(engine, REQUEST).weight_version == 0


def test_after_a_failed_update_the_engine_refuses(engine: LocalEngine) -> None:
    engine.begin_update(1, [tensor_meta(name, tensor) for name, tensor in engine.named_tensors().items()])
    with pytest.raises(WeightUpdateError, match="still open"):
        one(engine, REQUEST)
    engine.abort_update()
    with pytest.raises(WeightUpdateError, match="failed"):
        one(engine, REQUEST)


def test_requests_that_make_no_sense_list_every_problem(engine: LocalEngine) -> None:
    bad = replace(change(REQUEST, height=60, sde_type="ddpm"), sde_steps=(1, 4), return_steps=(4, 5), sample_ids=(1,))
    with pytest.raises(RequestError) as caught:
        engine.generate([REQUEST, bad])
    for part in ("'r0'", "60x64 pixels", "multiple of 16", "3 outputs for 1 sample ids", "'ddpm'", "sde_steps [4]"):
        assert part in str(caught.value)
    assert "return_steps [5] lie outside 0..4" in str(caught.value)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_image_names_its_sample(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, broken: float) -> None:
    decode = type(engine.family).decode

    def breaking(self: Any, vae: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        images = decode(self, vae, latents, height, width)
        images[1, 0, 3, 3] = broken
        return images

    monkeypatch.setattr(type(engine.family), "decode", breaking)
    with pytest.raises(FloatingPointError, match=r"sample 41 of request r0 .*seeds \[1001\]"):
        one(engine, REQUEST)


def test_asleep_or_paused_it_takes_no_requests_and_then_gives_the_same(engine: LocalEngine) -> None:
    before = one(engine, REQUEST).images
    for stop, go, word in ((engine.sleep, engine.wake_up, "asleep"), (engine.pause, engine.resume, "paused")):
        stop()
        with pytest.raises(RuntimeError, match=word):
            one(engine, REQUEST)
        go()
        np.testing.assert_array_equal(one(engine, REQUEST).images, before)


def test_bfloat16_stays_near_float32(engine: LocalEngine, tiny_sd3_dir: Path) -> None:
    exact = one(engine, change(REQUEST, sde_type="ode"))
    half = LocalEngine(tiny_sd3_dir, dtype="bf16")
    assert {tensor.dtype for tensor in half.named_tensors().values()} == {torch.bfloat16}
    assert half.pipeline.vae.dtype == half.pipeline.text_encoder.dtype == torch.float32
    rough = one(half, change(REQUEST, sde_type="ode"))
    difference = np.abs(exact.trajectories[0].clean - rough.trajectories[0].clean)
    assert rough.trajectories[0].latents.dtype == np.float32
    assert 0 < difference.mean() < 0.05
