"""Layouts are counted by hand here; the invariants hold for every layout that is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_runtime.placement.layout import Layout, LayoutError, Pool, lay_out, layout_problems, plan_layout


def test_colocated_shares_every_bundle() -> None:
    layout = plan_layout(colocate=True, actor_num_gpus_per_node=8, rollout_num_gpus_per_engine=2)
    assert layout.bundles_per_node == (8,)
    assert layout.roles["actor"].workers == tuple((i,) for i in range(8))
    assert layout.roles["rollout"].workers == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.roles["actor"].share == layout.roles["rollout"].share == 0.5


def test_colocated_ignores_rollout_num_gpus() -> None:
    layout = plan_layout(colocate=True, actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=3)
    assert layout.roles["rollout"].num_bundles == 8


def test_disaggregated_does_not_overlap() -> None:
    layout = plan_layout(colocate=False, actor_num_gpus_per_node=8, rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    assert layout.bundles_per_node == (8, 8)
    assert layout.roles["actor"].workers == tuple((i,) for i in range(8))
    assert layout.roles["rollout"].workers == ((8, 9), (10, 11), (12, 13), (14, 15))
    assert layout.roles["actor"].share == 1.0


def test_engines_default_to_the_trainers_count_in_whole_engines() -> None:
    layout = plan_layout(colocate=False, actor_num_gpus_per_node=3, rollout_num_gpus_per_engine=2)
    assert layout.roles["rollout"].workers == ((3, 4), (5, 6))


def test_engines_do_not_cross_machines() -> None:
    layout = plan_layout(
        colocate=False,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=9,
        rollout_num_gpus_per_engine=3,
        num_gpus_per_node=8,
    )
    assert layout.bundles_per_node == (1, 6, 3)


def test_an_engine_of_two_machines_fills_them() -> None:
    layout = plan_layout(
        colocate=False,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=16,
        rollout_num_gpus_per_engine=8,
        num_gpus_per_node=4,
    )
    assert layout.bundles_per_node == (4, 4, 4, 4, 4)
    assert layout.roles["rollout"].workers == (tuple(range(4, 12)), tuple(range(12, 20)))


def test_further_roles_fit_the_same_shape() -> None:
    layout = plan_layout(
        colocate=True,
        actor_num_gpus_per_node=2,
        shared_roles=("critic", "reference"),
        extra_pools=[Pool((1,), {"reward": 1})],
    )
    assert layout.bundles_per_node == (2, 1)
    assert layout.roles["critic"].workers == ((0,), (1,))
    assert layout.roles["reward"].workers == ((2,),)
    assert layout.roles["actor"].share == 0.25


def test_three_shares_leave_room() -> None:
    layout = lay_out([Pool((1,), {"a": 1, "b": 1, "c": 1})])
    assert 3 * layout.roles["a"].share <= 1.0


def test_a_role_in_two_pools_is_refused() -> None:
    with pytest.raises(LayoutError, match="'actor' is in two pools"):
        lay_out([Pool((1,), {"actor": 1}), Pool((1,), {"actor": 1})])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"colocate": False, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 4},
            "--rollout-num-gpus 6 is not a multiple of --rollout-num-gpus-per-engine 4; nearest valid: 4 or 8",
        ),
        ({"colocate": False, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 4}, "nearest valid: 4$"),
        (
            {"colocate": True, "actor_num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 3},
            "does not divide the trainer's 1 x 8 GPUs .* nearest valid: 2 or 4",
        ),
        (
            # 3 divides the 6 bundles, but the second engine would lie on both machines.
            {"colocate": True, "actor_num_nodes": 3, "actor_num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 3},
            "nearest valid: 2 or 6",
        ),
        ({"colocate": False, "rollout_num_gpus": 24, "rollout_num_gpus_per_engine": 12}, "nearest valid: 8 or 16"),
        ({"colocate": False, "rollout_num_gpus": 0}, "--rollout-num-gpus is 0, it must be at least 1"),
        ({"colocate": True, "actor_num_nodes": 0}, "--actor-num-nodes is 0"),
    ],
)
def test_counts_that_do_not_fit(counts: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_layout(**counts)


def test_all_problems_at_once() -> None:
    problems = layout_problems(
        colocate=False, actor_num_nodes=0, actor_num_gpus_per_node=-1, rollout_num_gpus=0, rollout_num_gpus_per_engine=0
    )
    assert len(problems) == 4


@given(
    colocate=st.booleans(),
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 9),
    rollout=st.none() | st.integers(1, 40),
    per_engine=st.integers(1, 20),
    machine=st.integers(1, 9),
)
def test_every_accepted_layout_is_sound(
    colocate: bool, nodes: int, per_node: int, rollout: int | None, per_engine: int, machine: int
) -> None:
    try:
        layout = plan_layout(
            colocate=colocate,
            actor_num_nodes=nodes,
            actor_num_gpus_per_node=per_node,
            rollout_num_gpus=rollout,
            rollout_num_gpus_per_engine=per_engine,
            num_gpus_per_node=machine,
        )
    except LayoutError:
        return
    _check_sound(layout, colocate)
    if not colocate and rollout is not None:
        assert layout.roles["rollout"].num_bundles == rollout


def _check_sound(layout: Layout, colocate: bool) -> None:
    reserved = [0.0] * layout.num_bundles
    for role in layout.roles.values():
        taken = [bundle for worker in role.workers for bundle in worker]
        assert len(taken) == len(set(taken))
        for worker in role.workers:
            nodes = {layout.node_of(bundle) for bundle in worker}
            assert len(nodes) == 1 or len(worker) == sum(layout.bundles_per_node[node] for node in nodes)
        for bundle in taken:
            reserved[bundle] += role.share
    assert all(0 < amount <= 1 for amount in reserved)
    overlap = set(layout.roles["actor"].workers) & set(layout.roles["rollout"].workers)
    assert colocate or not overlap
