"""What each family computes its own way, against diffusers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_rl.models.family import Guidance
from diffusion_rl.models.forward import cast_input, predict_velocity
from diffusion_rl.models.registry import get_family
from diffusion_rl.models.schedule import flow_schedule


def test_guidance() -> None:
    positive, negative = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    sd3, qwen = get_family("sd3"), get_family("qwen_image")
    combined = negative + 4.5 * (positive - negative)
    torch.testing.assert_close(sd3.combine_guidance(positive, negative, sd3.guidance(4.5)), combined)
    torch.testing.assert_close(qwen.combine_guidance(positive, negative, qwen.guidance(4.5)), combined)
    rescaled = qwen.combine_guidance(positive, negative, qwen.guidance(1.0, true_cfg_scale=4.5))
    np.testing.assert_allclose(
        np.linalg.norm(rescaled.numpy(), axis=-1), np.linalg.norm(positive.numpy(), axis=-1), rtol=1e-12
    )
    cosine = torch.nn.functional.cosine_similarity(rescaled, combined, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))
    assert not sd3.guidance(1.0).active
    assert qwen.guidance(9.0, true_cfg_scale=1.0) == Guidance(1.0, rescale=False)


def test_schedules_are_those_of_diffusers_and_leave_the_scheduler_alone() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = scheduler.sigmas.clone()
    schedule = get_family("sd3").schedule(scheduler, 7, torch.zeros(1, 16, 8, 8))
    other = FlowMatchEulerDiscreteScheduler(shift=3.0)
    other.set_timesteps(7)
    assert torch.equal(schedule.sigmas, other.sigmas)
    assert torch.equal(schedule.timesteps, other.timesteps)
    assert torch.equal(scheduler.sigmas, before)
    shifted = get_family("sd3").schedule(scheduler, 7, torch.zeros(1, 16, 8, 8), flow_shift=5.0)
    reference = FlowMatchEulerDiscreteScheduler(shift=5.0)
    reference.set_timesteps(7)
    assert torch.equal(shifted.sigmas, reference.sigmas)
    with pytest.raises(ValueError, match="--diffusion-num-steps"):
        flow_schedule(scheduler, 0)


def test_qwen_schedule_depends_on_the_number_of_tokens(tiny_qwen: Any) -> None:
    family = get_family("qwen_image")
    few = family.schedule(tiny_qwen.scheduler, 5, torch.zeros(1, 16, 16))
    many = family.schedule(tiny_qwen.scheduler, 5, torch.zeros(1, 4096, 16))
    assert few.sigmas[0] == many.sigmas[0] == 1.0
    assert (many.sigmas[1:5] >= few.sigmas[1:5]).all()
    assert few.sigmas[-2].item() == pytest.approx(0.02, rel=1e-5)


def test_qwen_packing_is_that_of_the_pipeline(tiny_qwen: Any) -> None:
    latents = torch.randn(2, 1, 4, 8, 8)
    packed = get_family("qwen_image").pack_latents(latents)
    assert torch.equal(packed, tiny_qwen._pack_latents(latents, 2, 4, 8, 8))


def test_qwen_encodes_pictures_to_what_it_decodes_from(tiny_qwen: Any) -> None:
    family, vae = get_family("qwen_image"), tiny_qwen.vae
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        latents = family.encode_images(vae, images)
        decoded = family.decode(vae, latents, 64, 64)
        raw = vae.encode(images.unsqueeze(2)).latent_dist.mode()
        expected = vae.decode(raw).sample[:, :, 0]
    assert latents.shape == (2, 16, 16)
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-5)


def test_sd3_encodes_pictures_to_what_it_decodes_from(tiny_sd3: Any) -> None:
    family, vae = get_family("sd3"), tiny_sd3.vae
    vae.register_to_config(scaling_factor=1.7, shift_factor=-0.3)
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        latents = family.encode_images(vae, images)
        raw = vae.encode(images).latent_dist.mode()
        torch.testing.assert_close(latents, (raw + 0.3) * 1.7)
        torch.testing.assert_close(family.decode(vae, latents, 64, 64), vae.decode(raw).sample, rtol=1e-4, atol=1e-5)


def test_qwen_batches_texts_of_different_length(tiny_qwen: Any) -> None:
    """Padding must not change a sample's velocity."""
    family = get_family("qwen_image")
    with torch.no_grad():
        short, long = family.encode_prompts(tiny_qwen, ["abc", "a much longer prompt than that"])
        assert len(short["encoder_hidden_states"]) < len(long["encoder_hidden_states"])
        (alone,) = family.encode_prompts(tiny_qwen, ["abc"])
        torch.testing.assert_close(alone["encoder_hidden_states"], short["encoder_hidden_states"], rtol=1e-4, atol=1e-5)
        latents, timesteps = torch.randn(2, 16, 16), torch.tensor([900.0, 400.0])

        def velocity(entries: list[dict[str, torch.Tensor]], rows: slice) -> torch.Tensor:
            count = len(entries)
            return predict_velocity(
                family,
                tiny_qwen.transformer,
                latents[rows],
                timesteps[rows],
                family.collate_conditions(entries),
                None,
                Guidance(1.0),
                extra=family.forward_arguments(64, 64, count, 8),
            )

        together = velocity([short, long], slice(0, 2))
        torch.testing.assert_close(together[0:1], velocity([short], slice(0, 1)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together[1:2], velocity([long], slice(1, 2)), rtol=1e-4, atol=1e-5)
    assert "encoder_hidden_states_mask" not in family.collate_conditions([short, short])


def test_guidance_without_negative_conditions_is_an_error(tiny_sd3: Any) -> None:
    family = get_family("sd3")
    conditions = family.collate_conditions(family.encode_prompts(tiny_sd3, ["a red circle"]))
    with pytest.raises(ValueError, match="negative prompt's conditions"):
        predict_velocity(
            family,
            tiny_sd3.transformer,
            torch.zeros(1, 4, 8, 8),
            torch.tensor([500.0]),
            conditions,
            None,
            Guidance(4.0),
            extra={},
        )


def test_input_dtypes() -> None:
    value = torch.ones(2)
    assert cast_input(value, None, torch.bfloat16).dtype == torch.float32
    assert cast_input(value, "default", torch.bfloat16).dtype == torch.bfloat16
    assert cast_input(value, "fp16", torch.bfloat16).dtype == torch.float16
    assert cast_input(torch.ones(2, dtype=torch.bool), "default", torch.bfloat16).dtype == torch.bool


def test_sd3_prompts_are_those_of_the_pipeline(tiny_sd3: Any, tiny_sd3_dir: Path) -> None:
    prompt = "a small red circle at the top left"
    (got,) = get_family("sd3").encode_prompts(tiny_sd3, [prompt])
    embeds, _, pooled, _ = tiny_sd3.encode_prompt(
        prompt=prompt, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=12
    )
    assert torch.equal(got["encoder_hidden_states"], embeds[0])
    assert torch.equal(got["pooled_projections"], pooled[0])
