"""Two ranks against one: gradients, updates, metrics, and a checkpoint that changes the number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from pair_helpers import full_weights, pairs_of, rank_main, roll_out, run_case, start

from diffusion_rl.algorithms.nft_timesteps import drop_final_steps
from diffusion_rl.train_data import rollout_advantages, samples_to_noised_rows


@pytest.mark.ranks
def test_two_ranks_equal_one(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    pairs = pairs_of(roll_out(tiny_sd3_dir))
    cases: dict[str, dict[str, Any]] = {
        "uneven": {"pairs": pairs[:5], "layout": {"micro_batch_size": 4}},
        "one_pair": {"pairs": [pairs[0][:1]]},  # the other rank has none
        "tiles": {
            "pairs": pairs,
            "settings": {"ref_mode": "ref", "diffusion_kl_beta": 0.1},
            "layout": {"num_steps": 2, "micro_batch_size_sample": 3, "micro_batch_size_tstep": 1},
            "updates": "tiles",
        },
    }
    lora: dict[str, Any] = {"use_lora": True, "lora_rank": 3, "lora_alpha": 6, "optimizer": "sgd", "lr": 0.1}
    cases["lora"] = {
        "pairs": pairs[:5],
        "settings": lora | {"ref_mode": "lora_base", "diffusion_kl_beta": 0.1},
        "layout": {"num_steps": 2, "micro_batch_size": 4},
        "updates": "lora",
    }
    samples = roll_out(tiny_sd3_dir, sde_type="ode")
    noised = samples_to_noised_rows(
        samples,
        rollout_advantages(samples),
        drop_final_steps,
        SimpleNamespace(diffusion_nft_num_dropped_timesteps=2),
        seed=1,
    )
    cases["nft"] = {
        "pairs": noised,
        "settings": {"loss_type": "nft", "use_ema": True, "rollout_weights": "ema"},
        "layout": {"micro_batch_size": 3},
    }
    mp.spawn(rank_main, (2, tiny_sd3_dir, cases, tmp_path), nprocs=2)
    found = [torch.load(tmp_path / f"results.{rank}.pt", weights_only=False) for rank in (0, 1)]
    published: dict[str, dict[str, torch.Tensor]] = {}
    for name, case in cases.items():
        one = run_case(tiny_sd3_dir, case, tmp_path)
        two = found[0][name]
        published[name] = one["published"]
        assert found[1][name]["metrics"] == two["metrics"]
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
        assert two["gradient"].keys() == one["gradient"].keys()
        for parameter, gradient in one["gradient"].items():
            torch.testing.assert_close(two["gradient"][parameter], gradient, rtol=0, atol=2e-6)
        for parameter, weight in one["weights"].items():
            # AdamW's first steps follow the sign of gradients, some of which are zero up to rounding.
            close = (two["weights"][parameter] - weight).abs() < 1e-5
            assert close.float().mean() > 0.98
        assert two["published"].keys() == one["published"].keys()
    for parameter, weight in found[0]["lora"]["published"].items():  # SGD's steps don't follow the sign of rounding
        torch.testing.assert_close(weight, published["lora"][parameter], rtol=0, atol=1e-6)
    for name, settings in (("tiles", {}), ("lora", lora)):
        loaded = start(tiny_sd3_dir, **settings)
        loaded.load(tmp_path / f"{name}.2")
        for parameter, weight in full_weights(loaded).items():
            assert torch.equal(weight, found[0][name]["weights"][parameter])
        loaded.shutdown()
