"""Two (and four) ranks against one: gradients, updates, metrics, exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from fsdp_helpers import VOCABULARY, make_rows
from fsdp_rank_checks import Scenario, rank_main, run_scenario
from fsdp_reference import assert_same_gradients
from transformers import AutoModelForCausalLM

from llm_rl.algorithms.mis import mis_correction

pytestmark = pytest.mark.ranks


def scenarios(replicas: int, critic: Path, teacher: Path) -> list[Scenario]:
    """One for each way in which ranks could matter."""
    unequal = make_rows(1, groups=1, responses=(30, 60)) + make_rows(2, groups=2, group_size=2, responses=(1, 3))
    for i, row in enumerate(unequal):
        row["sample_index"] = i
    split = make_rows(3)
    for i, row in enumerate(split):
        row["sample_index"] = i // 5  # rows of one sample end up on different ranks
    plain = {"clip_grad": 0.0, "dp_replicate_size": replicas}
    small = {"max_tokens_per_gpu": None, "micro_batch_size": 2}
    whitened = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}
    ppo = {"advantage_estimator": "ppo", "critic_load": critic, "lambd": 0.9, "normalize_advantages": True}
    rejecting = {"use_tis": True, "use_rs": True, "custom_tis_function": mis_correction, "tis_batch_normalize": True}
    rejecting |= {"rs_lower_bound": 0.7, "rs_upper_bound": 1.4}
    dpo = {"loss_type": "dpo_loss", "ref_load": teacher}
    far = {"use_kl_loss": True, "kl_loss_coef": 0.3, "ref_load": teacher}
    # Rows of older weights: sequences have drifted, and the ratio is not 1.
    drifted = far | {"kl_loss_type": "low_var_kl", "use_unbiased_kl": True, "use_opsm": True, "opsm_delta": 0.02}
    centred = {"loss_type": "score_centering", "score_centering_is": "tis"}
    updates = {"dp_replicate_size": replicas, "clip_grad": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    # AdamW's first steps follow the sign of each gradient, rounding of a zero included, unless epsilon is above it.
    updates["adam_eps"] = 1e-5
    rollouts = [make_rows(6), make_rows(7, version=1)]
    two_steps = {"num_steps": 2, "max_tokens_per_gpu": 60}
    todo = [
        Scenario("unequal", [unequal], plain | {"calculate_per_token_loss": True, "entropy_coef": 0.01}, small),
        Scenario("split", [split], plain, {"max_tokens_per_gpu": 40}),
        Scenario("updates", rollouts, updates, two_steps, gradient_only=False),
    ]
    if replicas == 1:
        todo += [
            Scenario("balanced", [unequal], plain | {"attn_implementation": "sdpa"}, {"balance_data": True}),
            Scenario("one_row", [make_rows(4, groups=1, group_size=1)], plain),  # the other ranks have none
            Scenario("whitened", [make_rows(5)], plain | whitened),
            Scenario("ppo", [unequal], plain | ppo, small),
            Scenario("distilled", [unequal], plain | {"use_opd": True, "opd_teacher_load": teacher}, small),
            Scenario("adapted", [unequal], plain | {"lora_rank": 4, "use_kl_loss": True}, small),
            Scenario("rejecting", [split], plain | rejecting, {"max_tokens_per_gpu": 40}),
            Scenario("preferred", [make_rows(9, groups=5, group_size=2)], plain | dpo, small, pairs=True),
            Scenario("drifted", [make_rows(10, version=-1)], plain | drifted, small),
            Scenario("k2", [unequal], plain | far | {"kl_loss_type": "k2"}, small),
            Scenario("k3", [unequal], plain | far | {"kl_loss_type": "k3"}, small),
            Scenario("centred", [with_candidates(unequal)], plain | centred, small),
        ]
    for scenario in todo:
        scenario.name += f"-{replicas}"
    return todo


def with_candidates(rows: list[dict], slots: int = 4) -> list[dict]:
    """Rows with likely tokens at each position, now and then fewer of them."""
    rng, found = np.random.default_rng(0), []
    for row in rows:
        length = row["response_length"]
        ids = np.stack([rng.permutation(VOCABULARY)[:slots] for _ in range(length)]).astype(np.int32)
        log_probs = np.log(rng.dirichlet(np.ones(slots + 2), length)[:, :slots]).astype(np.float32)
        unused = rng.random((length, slots)) < 0.1
        ids[unused], log_probs[unused] = -1, -np.inf
        found.append(row | {"rollout_topk_token_ids": ids, "rollout_topk_log_probs": log_probs})
    return found


def compare(world_size, todo, model, out):
    mp.spawn(rank_main, (world_size, todo, model, out), nprocs=world_size)
    found = torch.load(out / f"results.{world_size}.pt", weights_only=False)
    for scenario in todo:
        single = scenario.settings | {"dp_replicate_size": 1}
        one = run_scenario(replace(scenario, settings=single), model, out)
        many = found[scenario.name]
        for name, weight in one["start"].items():
            torch.testing.assert_close(many["start"][name], weight, rtol=0, atol=0)  # every rank got its shards
        if scenario.gradient_only:
            assert_same_gradients(many["gradient"], one["gradient"], rtol=0, atol=2e-6)
        for a, b in zip(many["metrics"], one["metrics"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(many["weights"][name], weight, rtol=0, atol=1e-6)
        assert many["names"] == one["names"]
        if scenario.name.startswith("drifted"):
            assert 0 < one["metrics"][0]["train/opsm_clipfrac"] < 1
        assert len(many["bytes"]) == len(one["bytes"])
        if scenario.name.startswith("updates"):
            exported = AutoModelForCausalLM.from_pretrained(out / f"{scenario.name}.{world_size}")
            for name, weight in exported.named_parameters():
                torch.testing.assert_close(weight.detach(), many["weights"][name], rtol=0, atol=0)
        per_rank = [
            torch.load(out / f"metrics.{scenario.name}.{world_size}.{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]
        assert all(metrics == per_rank[0] for metrics in per_rank)


def test_two_ranks_equal_one(tiny_model_dir, tiny_critic_dir, tiny_teacher_dir, tmp_path):
    """Sharded over both, and as two replicas."""
    others = tiny_critic_dir, tiny_teacher_dir
    compare(2, scenarios(1, *others) + scenarios(2, *others), tiny_model_dir, tmp_path)

    # Saved on two ranks, loaded on one: the third rollout ends where a single rank ends that did all three.
    updates = next(s for s in scenarios(1, *others) if s.name == "updates-1")
    third = make_rows(8, version=2)
    whole = run_scenario(replace(updates, name="whole", rollouts=[*updates.rollouts, third]), tiny_model_dir, tmp_path)
    fresh = [dict(row, weight_version=0) for row in third]  # the loaded trainer counts from 0 again in this test
    saved = tmp_path / "checkpoint.updates-1.2"
    resumed = replace(updates, name="resumed", rollouts=[fresh], load=saved)
    resumed = run_scenario(resumed, tiny_model_dir, tmp_path)
    assert resumed["metrics"][0] == pytest.approx(whole["metrics"][2], rel=1e-3, abs=1e-6)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks_equals_one(tiny_model_dir, tiny_critic_dir, tiny_teacher_dir, tmp_path):
    """Gradients, and a checkpoint of one rank loaded on four."""
    others = tiny_critic_dir, tiny_teacher_dir
    updates = next(s for s in scenarios(2, *others) if s.name == "updates-2")
    single = replace(updates, name="saved", settings=updates.settings | {"dp_replicate_size": 1})
    one = run_scenario(single, tiny_model_dir, tmp_path)
    loaded = replace(updates, name="loaded-2", load=tmp_path / "checkpoint.saved.1")
    compare(4, [*scenarios(2, *others), loaded], tiny_model_dir, tmp_path)
    found = torch.load(tmp_path / "results.4.pt", weights_only=False)["loaded-2"]
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["start"][name], weight, rtol=0, atol=0)
