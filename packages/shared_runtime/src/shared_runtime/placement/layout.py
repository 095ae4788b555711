"""Which accelerators every worker of a run gets, as pure functions of counts.

A *bundle* is one accelerator. A *pool* is some bundles and the roles that take turns on them: colocated runs have one
pool with trainers and engines in it, disaggregated runs one pool each. Bundles are numbered through the whole layout,
in the order of the pools, and come in nodes; the bundles of one node land on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

ACTOR = "actor"
ROLLOUT = "rollout"
REWARD = "reward"


class LayoutError(ValueError):
    """Counts that don't fit; the message has every problem, with the numbers."""


@dataclass(frozen=True)
class Pool:
    """Bundles and the roles that share them.

    Attributes:
        bundles_per_node: One count a node, e.g. `(8, 8)`.
        roles: Name of a role to the number of bundles that one of its workers takes. Every role gets all the bundles
            of its pool, so `{"actor": 1, "rollout": 4}` on 8 bundles is 8 trainer ranks and 2 engines.
    """

    bundles_per_node: tuple[int, ...]
    roles: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bundles(self) -> int:
        return sum(self.bundles_per_node)


@dataclass(frozen=True)
class RoleLayout:
    """Where the workers of one role go.

    Attributes:
        workers: The bundle indices of each worker, in rank order.
        share: The part of each bundle that one worker reserves, so that all the roles of a pool fit.
    """

    workers: tuple[tuple[int, ...], ...]
    share: float

    @property
    def num_bundles(self) -> int:
        return sum(len(bundles) for bundles in self.workers)


@dataclass(frozen=True)
class Layout:
    """All bundles of a run, node by node, and what each role takes of them."""

    bundles_per_node: tuple[int, ...]
    roles: Mapping[str, RoleLayout]

    @property
    def num_bundles(self) -> int:
        return sum(self.bundles_per_node)

    def node_of(self, bundle: int) -> int:
        """The node (an index into `bundles_per_node`) that holds a bundle."""
        for node, end in enumerate(accumulate(self.bundles_per_node)):
            if 0 <= bundle < end:
                return node
        raise IndexError(f"bundle {bundle} of a layout with {self.num_bundles}")


def lay_out(pools: Sequence[Pool]) -> Layout:
    """Number the bundles of all pools and hand them to the roles.

    Raises:
        LayoutError: if a role appears twice, or a worker would be split over nodes without filling them.
    """
    roles: dict[str, RoleLayout] = {}
    nodes: list[int] = []
    problems: list[str] = []
    for pool in pools:
        first = sum(nodes)
        # Ray counts resources in steps of 1e-4: round down, or the shares would add up to more than one.
        share = int(10_000 / max(1, len(pool.roles))) / 10_000
        for role, per_worker in pool.roles.items():
            problem = _split_problem(role, pool.bundles_per_node, per_worker)
            if role in roles:
                problem = f"role {role!r} is in two pools"
            if problem:
                problems.append(problem)
                continue
            starts = range(first, first + pool.num_bundles, per_worker)
            roles[role] = RoleLayout(tuple(tuple(range(start, start + per_worker)) for start in starts), share)
        nodes.extend(pool.bundles_per_node)
    if problems:
        raise LayoutError("; ".join(problems))
    return Layout(tuple(nodes), roles)


def plan_layout(
    *,
    colocate: bool,
    actor_num_nodes: int = 1,
    actor_num_gpus_per_node: int = 1,
    rollout_num_gpus: int | None = None,
    rollout_num_gpus_per_engine: int = 1,
    num_gpus_per_node: int = 8,
    shared_roles: Sequence[str] = (),
    extra_pools: Sequence[Pool] = (),
) -> Layout:
    """The layout of a run, from the counts of the command line.

    Args:
        colocate: Engines on the trainer's bundles. `rollout_num_gpus` is then ignored: it is
            `actor_num_nodes x actor_num_gpus_per_node`, see `reconciled_rollout_num_gpus`.
        actor_num_nodes: Machines of the trainer.
        actor_num_gpus_per_node: Trainer ranks a machine.
        rollout_num_gpus: Accelerators of all engines together; by default as many as the trainer has.
        rollout_num_gpus_per_engine: Accelerators of one engine (its tensor-parallel size).
        num_gpus_per_node: Size of the machines that the engines go to.
        shared_roles: Further roles, one worker a bundle, on the trainer's bundles (`critic`, `reference`).
        extra_pools: Further bundles with roles of their own (`reward`).

    Raises:
        LayoutError: with every problem that `layout_problems` finds.
    """
    problems = layout_problems(
        colocate=colocate,
        actor_num_nodes=actor_num_nodes,
        actor_num_gpus_per_node=actor_num_gpus_per_node,
        rollout_num_gpus=rollout_num_gpus,
        rollout_num_gpus_per_engine=rollout_num_gpus_per_engine,
        num_gpus_per_node=num_gpus_per_node,
    )
    if problems:
        raise LayoutError("; ".join(problems))
    actor_nodes = (actor_num_gpus_per_node,) * actor_num_nodes
    actor_roles = {ACTOR: 1} | dict.fromkeys(shared_roles, 1)
    engine_bundles = reconciled_rollout_num_gpus(
        colocate, actor_num_nodes * actor_num_gpus_per_node, rollout_num_gpus, rollout_num_gpus_per_engine
    )
    if colocate:
        pools = [Pool(actor_nodes, actor_roles | {ROLLOUT: rollout_num_gpus_per_engine})]
    else:
        engine_nodes = _engine_nodes(engine_bundles, rollout_num_gpus_per_engine, num_gpus_per_node)
        pools = [Pool(actor_nodes, actor_roles), Pool(engine_nodes, {ROLLOUT: rollout_num_gpus_per_engine})]
    return lay_out([*pools, *extra_pools])


def reconciled_rollout_num_gpus(
    colocate: bool, actor_num_gpus: int, rollout_num_gpus: int | None, rollout_num_gpus_per_engine: int = 1
) -> int:
    """The accelerators that the engines really get.

    Colocated: the trainer's. Otherwise what was asked for, or, unasked, as many as the trainer has, rounded up to
    whole engines.
    """
    if colocate:
        return actor_num_gpus
    if rollout_num_gpus is not None:
        return rollout_num_gpus
    return -(-actor_num_gpus // rollout_num_gpus_per_engine) * rollout_num_gpus_per_engine


def layout_problems(
    *,
    colocate: bool,
    actor_num_nodes: int,
    actor_num_gpus_per_node: int,
    rollout_num_gpus: int | None,
    rollout_num_gpus_per_engine: int,
    num_gpus_per_node: int = 8,
) -> list[str]:
    """What is wrong with the counts, one message each with the nearest valid numbers; empty when they fit."""
    counts = {
        "--actor-num-nodes": actor_num_nodes,
        "--actor-num-gpus-per-node": actor_num_gpus_per_node,
        "--rollout-num-gpus-per-engine": rollout_num_gpus_per_engine,
        "--num-gpus-per-node": num_gpus_per_node,
    }
    if not colocate and rollout_num_gpus is not None:
        counts["--rollout-num-gpus"] = rollout_num_gpus
    problems = [f"{flag} is {count}, it must be at least 1" for flag, count in counts.items() if count < 1]
    if problems:
        return problems
    per_engine = rollout_num_gpus_per_engine
    if colocate:
        nodes: tuple[int, ...] = (actor_num_gpus_per_node,) * actor_num_nodes
        if not _fits(nodes, per_engine):
            valid = [size for size in range(1, sum(nodes) + 1) if _fits(nodes, size)]
            problems.append(
                f"--rollout-num-gpus-per-engine {per_engine} does not divide the trainer's "
                f"{actor_num_nodes} x {actor_num_gpus_per_node} GPUs (--colocate) into engines; "
                f"nearest valid: {_nearest(valid, per_engine)}"
            )
        return problems
    actor_num_gpus = actor_num_nodes * actor_num_gpus_per_node
    total = reconciled_rollout_num_gpus(False, actor_num_gpus, rollout_num_gpus, per_engine)
    if total % per_engine:
        lower = total // per_engine * per_engine
        valid = [count for count in (lower, lower + per_engine) if count > 0]
        problems.append(
            f"--rollout-num-gpus {total} is not a multiple of --rollout-num-gpus-per-engine {per_engine}; "
            f"nearest valid: {_nearest(valid, total)}"
        )
    if per_engine > num_gpus_per_node and per_engine % num_gpus_per_node:
        lower = per_engine // num_gpus_per_node * num_gpus_per_node
        problems.append(
            f"--rollout-num-gpus-per-engine {per_engine} is more than one node of --num-gpus-per-node "
            f"{num_gpus_per_node} and not whole nodes; nearest valid: {lower} or {lower + num_gpus_per_node}"
        )
    return problems


def _engine_nodes(total: int, per_engine: int, num_gpus_per_node: int) -> tuple[int, ...]:
    """Nodes for `total` bundles, each with as many whole engines as a machine holds."""
    if per_engine > num_gpus_per_node:
        return (num_gpus_per_node,) * (total // num_gpus_per_node)
    usable = num_gpus_per_node // per_engine * per_engine
    full, rest = divmod(total, usable)
    return (usable,) * full + ((rest,) if rest else ())


def _fits(nodes: Sequence[int], per_worker: int) -> bool:
    return _split_problem("", nodes, per_worker) is None


def _split_problem(role: str, nodes: Sequence[int], per_worker: int) -> str | None:
    """Why workers of this size can't be cut from the nodes: each must lie within a node, or fill whole ones."""
    total = sum(nodes)
    if per_worker < 1 or total % per_worker:
        return f"role {role!r}: {total} bundles do not divide into workers of {per_worker}"
    borders = set(accumulate(nodes))
    for start in range(0, total, per_worker):
        end = start + per_worker
        crosses = any(start < border < end for border in borders)
        if crosses and not ((start == 0 or start in borders) and end in borders):
            return f"role {role!r}: a worker of {per_worker} bundles would be split between nodes of {tuple(nodes)}"
    return None


def _nearest(valid: Sequence[int], wanted: int) -> str:
    """The closest valid numbers below and above."""
    below = [value for value in valid if value < wanted][-1:]
    above = [value for value in valid if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)
