"""Hooks in whole runs on the untrained tiny pipeline, in this process: their effect on what is sampled and trained.

`my_pictures` is made of the examples in docs/customization.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documentation import ROOT, write_modules

from diffusion_rl.config import DiffusionBatchConfig, DiffusionFsdpConfig, ModelConfig, SamplingConfig, TrainConfig
from diffusion_rl.models.family import Guidance
from diffusion_rl.models.loading import load_pipeline
from diffusion_rl.models.sd3 import SD3
from diffusion_rl.sample import Sample
from diffusion_rl.train import train
from diffusion_rl.trainers.fsdp.batch import collate_pairs
from shared_runtime.config import CheckpointConfig, ConfigError, DataConfig, RunConfig, TrackingConfig, from_dict

GROUP = 4
ROWS = [
    {"input": "a small red circle at the top left", "metadata": {"avoid": "a blue square"}},
    {"input": "a large blue square at the bottom right"},
]
SAMPLES: list[Sample] = []
CALLS: list[list[int]] = []

Row = dict[str, float]


def keep(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
    """Remembers the samples (`--custom-rollout-log-function-path`)."""
    SAMPLES[:] = samples
    return False


def counting(args: Any, samples: list[Sample]) -> list[float]:
    """Remembers what it is called with (`--custom-rm-path`)."""
    CALLS.append([sample.index for sample in samples])
    return [float(sample.index) for sample in samples]


@pytest.fixture(scope="module", autouse=True)
def _my_pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("examples")
    write_modules(ROOT / "docs" / "customization.md", directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setitem(sys.modules, "test_hooks_functions", sys.modules[__name__])
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pictures"]:
        del sys.modules[name]


@pytest.fixture
def run(tiny_sd3_dir: Path, tmp_path: Path) -> Callable[..., Row]:
    """Trains one rollout; keywords are the settings that differ, by group. Gives its metrics."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    base = TrainConfig(
        run=RunConfig(runs_dir=tmp_path / "runs", in_process=True),
        model=ModelConfig(hf_checkpoint=tiny_sd3_dir),
        data=DataConfig(prompt_data=str(path)),
        batch=DiffusionBatchConfig(
            num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=GROUP, rollout_microgroup_size=3
        ),
        sampling=SamplingConfig(
            diffusion_num_steps=3, diffusion_guidance_scale=2.0, diffusion_height=64, diffusion_width=64
        ),
        fsdp=DiffusionFsdpConfig(diffusion_forward_dtype="fp32"),
        checkpoint=CheckpointConfig(save_hf=None),
        tracking=TrackingConfig(progress="none"),
    )

    def run_(hooks: dict[str, str], **groups: Any) -> Row:
        hooks = {"custom_rollout_log_function_path": "test_hooks_functions.keep"} | hooks
        result = train(from_dict(base, {"hooks": hooks, **groups}))
        rows = [json.loads(line) for line in result.metrics_path.read_text().splitlines()]
        return {row["step"]: row for row in rows}[0]

    return run_


def test_generation_reward_advantages_rows_and_loss(run: Callable[..., Row]) -> None:
    row = run(
        {
            "custom_generate_function_path": "my_pictures.generation.avoid_what_the_row_says",
            "custom_rm_path": "my_pictures.rewards.one_colour",
            "custom_reward_post_process_path": "my_pictures.shaping.over_the_batch",
            "custom_expand_samples_to_train_pairs_path": "my_pictures.rows.noisiest_step_only",
            "custom_loss_function_path": "my_pictures.loss.reinforce",
        },
        reward={"custom_rm_args": "green"},
        algorithm={"loss_type": "custom_loss"},
    )
    assert [sample.seed for sample in SAMPLES] == [42 + i for i in range(2 * GROUP)]
    avoided, empty = ([s.negative_conditions for s in SAMPLES[i : i + GROUP]] for i in (0, GROUP))
    assert all(_same(entry, avoided[0]) for entry in avoided)
    assert all(_same(entry, empty[0]) for entry in empty)
    assert not _same(avoided[0], empty[0])
    images = np.stack([sample.generated_output for sample in SAMPLES]).astype(np.float64)
    green = images[:, 1].mean(axis=(1, 2)) - images.mean(axis=(1, 2, 3))
    assert [sample.reward for sample in SAMPLES] == pytest.approx(green.tolist(), abs=1e-6)
    # One pair a sample, and each counts the same.
    assert row["train/mean_square_advantage"] == pytest.approx(statistics.pvariance(green.tolist()), rel=1e-4)
    assert row["train/grad_norm"] > 0
    assert row["train/log_prob_mean_abs_diff"] < 1e-5
    log_probs = [float(s.trajectory.log_probs[0]) for s in SAMPLES if s.trajectory is not None]
    mean = green.mean()
    expected = -statistics.fmean((g - mean) * log_prob for g, log_prob in zip(green, log_probs, strict=True))
    assert row["train/loss"] == pytest.approx(expected, rel=1e-3)


def test_conversion_of_samples_to_rows(run: Callable[..., Row]) -> None:
    row = run(
        {
            "custom_rm_path": "my_pictures.rewards.unlike_the_others",
            "custom_convert_samples_to_train_data_path": "my_pictures.rows.better_than_half",
            "custom_loss_function_path": "my_pictures.loss.reinforce",
        },
        reward={"group_rm": True},
        algorithm={"loss_type": "custom_loss"},
    )
    for start in (0, GROUP):
        images = np.stack([sample.generated_output for sample in SAMPLES[start : start + GROUP]]).astype(np.float64)
        expected = abs(images - images.mean(axis=0)).mean(axis=(1, 2, 3))
        assert [s.reward for s in SAMPLES[start : start + GROUP]] == pytest.approx(expected.tolist(), rel=1e-4)
    squares = [(float(sample.reward) - 0.5) ** 2 for sample in SAMPLES]  # type: ignore[arg-type]
    assert row["train/mean_square_advantage"] == pytest.approx(statistics.fmean(squares), rel=1e-4)


@pytest.mark.parametrize(
    ("group_rm", "calls"), [(False, [[0, 1, 2], [3], [4, 5, 6], [7]]), (True, [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_a_reward_gets_a_microgroup_or_a_group(run: Callable[..., Row], group_rm: bool, calls: list[list[int]]) -> None:
    CALLS.clear()
    run({"custom_rm_path": "test_hooks_functions.counting"}, reward={"group_rm": group_rm})
    assert sorted(CALLS) == calls
    assert [sample.reward for sample in SAMPLES] == [float(i) for i in range(2 * GROUP)]


def test_a_mixture_of_built_in_rewards(run: Callable[..., Row]) -> None:
    row = run(
        {},
        reward={"rm_type": "weighted_mixture", "reward_key": "weighted"},
        reward_options={"weighted_mixture_weights": "jpeg_compressibility=0.5,jpeg_incompressibility=2"},
    )
    sizes = [-sample.reward["jpeg_compressibility"] for sample in SAMPLES]  # type: ignore[index]
    assert min(sizes) > 0
    assert [sample.reward["weighted"] for sample in SAMPLES] == pytest.approx([1.5 * size for size in sizes])  # type: ignore[index]
    assert row["rollout/raw_reward"] == pytest.approx(1.5 * statistics.fmean(sizes))


class SD3WithoutGuidance(SD3):
    """SD3 under another name, whatever `--diffusion-guidance-scale` says."""

    name = "sd3_without_guidance"
    name_patterns = ("never-looked-at",)

    def guidance(self, guidance_scale: float, true_cfg_scale: float | None = None) -> Guidance:
        return Guidance(1.0)


def test_a_family_of_ones_own(run: Callable[..., Row]) -> None:
    """Engine and trainer both use it: no negative branch, and the trainer finds the engine's log-probs."""
    row = run(
        {"custom_rm_path": "test_hooks_functions.counting"},
        model={"train_pipeline_config_path": "test_hooks_functions.SD3WithoutGuidance"},
    )
    assert all(sample.negative_conditions is None for sample in SAMPLES)
    assert row["train/log_prob_mean_abs_diff"] < 1e-5


def test_micro_batches_of_ones_own(run: Callable[..., Row]) -> None:
    """They are trained on; something else than a batch is refused."""
    hooks = {
        "custom_rm_path": "test_hooks_functions.counting",
        "custom_expand_samples_to_train_pairs_path": "my_pictures.rows.noisiest_step_only",
    }
    row = run(
        hooks | {"custom_prepare_train_batch_path": "test_hooks_functions.three_times_the_advantage"},
        optimizer={"clip_grad": 0.0},
        algorithm={"diffusion_adv_clip_max": 100.0},
    )
    plain = run(hooks, optimizer={"clip_grad": 0.0}, algorithm={"diffusion_adv_clip_max": 100.0}, run={"run_name": "2"})
    assert row["train/grad_norm"] == pytest.approx(3 * plain["train/grad_norm"], rel=1e-4)
    run(hooks | {"custom_prepare_train_batch_path": "my_pictures.batches.late_steps_count_half"}, run={"run_name": "3"})
    with pytest.raises(TypeError, match="must return a PairBatch of 1 rows, not list"):
        run(hooks | {"custom_prepare_train_batch_path": "test_hooks_functions.no_batch"}, run={"run_name": "4"})


def three_times_the_advantage(args: Any, rows: list[Any], family: Any, device: Any) -> Any:
    batch = collate_pairs(rows, family, device)
    batch.advantages *= 3.0
    return batch


def no_batch(args: Any, rows: list[Any], family: Any, device: Any) -> Any:
    return rows


def test_a_loader_of_ones_own(run: Callable[..., Row], tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """A pipeline whose weights have names that diffusers doesn't look for by itself; trainer and engine find them."""
    directory = tmp_path / "sd3-fp16"
    load_pipeline(str(tiny_sd3_dir), SD3()).save_pretrained(directory, variant="fp16")
    hooks = {"custom_rm_path": "test_hooks_functions.counting"}
    with pytest.raises(OSError, match="no file named"):
        run(hooks, model={"hf_checkpoint": str(directory)})
    row = run(
        hooks | {"model_backend_path": "my_pictures.models.HalfPrecisionFiles"},
        model={"hf_checkpoint": str(directory)},
        run={"run_name": "mine"},
    )
    assert row["train/log_prob_mean_abs_diff"] < 1e-5


def test_rows_that_cannot_be_trained_on_are_named(run: Callable[..., Row]) -> None:
    flag = "--custom-convert-samples-to-train-data-path"
    hooks = {"custom_rm_path": "test_hooks_functions.counting"}
    with pytest.raises(ValueError, match=rf"{flag}: a row of sample 0 .* lacks timestep, advantage"):
        run(hooks | {"custom_convert_samples_to_train_data_path": "test_hooks_functions.without_a_timestep"})


def without_a_timestep(args: Any, samples: list[Sample]) -> list[list[dict[str, Any]]]:
    return [[{"sample_index": s.index, "conditions": s.conditions, "trained": 1.0, "sigma": 1.0}] for s in samples]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"custom_loss_function_path": "my_pictures.loss.reinforce"}, "--loss-type custom_loss"),
        ({"custom_generate_function_path": "my_pictures.rewards.one_colour"}, "async def one_colour(args, microgroup"),
        (
            {
                "custom_convert_samples_to_train_data_path": "my_pictures.rows.better_than_half",
                "custom_reward_post_process_path": "my_pictures.shaping.over_the_batch",
            },
            "--custom-reward-post-process-path would never be called",
        ),
    ],
)
def test_hooks_that_do_not_fit_are_refused(run: Callable[..., Row], hooks: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(hooks, reward={"rm_type": "jpeg_compressibility"})
    assert message in str(refused.value)


def _same(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_pictures.rewards.one_colour", "expected a subclass of diffusion_rl.models.family.ModelFamily"),
        ("diffusion_rl.models.family.ModelFamily", "the class lacks decode, encode_images, encode_prompts"),
        ("my_pictures.families.None", "no module named 'my_pictures.families'"),
    ],
)
def test_families_that_do_not_fit_are_refused(run: Callable[..., Row], name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run({}, model={"train_pipeline_config_path": name}, reward={"rm_type": "jpeg_compressibility"})
    assert message in str(refused.value)
