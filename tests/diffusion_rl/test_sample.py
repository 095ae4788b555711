"""Seeds and trajectories."""

from __future__ import annotations

import numpy as np
import pytest

from diffusion_rl.sample import Sample, Trajectory, request_seed
from shared_runtime.data.serialize import sample_from_dict, sample_to_dict


@pytest.mark.parametrize("size", [1, 3, 8])
def test_seeds_are_distinct_and_do_not_depend_on_the_microgroup_size(size: int) -> None:
    seeds = [
        request_seed(42, group, 8, start) + k
        for group in range(50)
        for start in range(0, 8, size)
        for k in range(min(size, 8 - start))
    ]
    assert seeds == list(range(42, 42 + 400))


def test_seeds_wrap_before_the_member_is_added() -> None:
    assert request_seed(2**31 - 1, 0, 16, 8) == 2**31 - 1 + 8
    assert request_seed(2**31 - 1, 1, 16, 8) == 15 + 8


def test_trajectory_looks_latents_up_by_step() -> None:
    trajectory = Trajectory(
        sigmas=np.linspace(1, 0, 5, dtype=np.float32),
        timesteps=np.linspace(1000, 250, 4, dtype=np.float32),
        latents=np.stack([np.full((2,), i, dtype=np.float32) for i in (1, 2, 4)]),
        latent_indices=(1, 2, 4),
        sde_steps=(1,),
        log_probs=np.zeros(1, dtype=np.float32),
    )
    assert trajectory.num_steps == 4
    assert trajectory.latent(2).tolist() == [2, 2]
    assert trajectory.clean.tolist() == [4, 4]
    with pytest.raises(KeyError, match="latents 3"):
        trajectory.latent(3)


def test_a_waiting_sample_survives_the_buffer() -> None:
    sample = Sample(index=5, group_index=2, prompt="a red circle", metadata={"rm_type": "shapes"})
    assert sample_from_dict(Sample, sample_to_dict(sample)) == sample
