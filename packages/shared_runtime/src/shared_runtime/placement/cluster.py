"""The Ray cluster of a run: connect to one or start one, reserve the layout, leave nothing behind."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_runtime.placement import reaper
from shared_runtime.placement.layout import Layout, LayoutError
from shared_runtime.placement.processes import sigterm_as_exit

if TYPE_CHECKING:
    from shared_runtime.placement.ray_group import RayWorkerGroup

GiB = 1 << 30
# Unix sockets below the directory have at most 107 characters in their path, so not in an arbitrary TMPDIR.
_TEMP_ROOT = Path("/tmp")


class ClusterError(RuntimeError):
    """The cluster can't be used for this run; the message has the counts."""


@dataclass(frozen=True)
class Slot:
    """The place of one worker.

    Attributes:
        placement_group: Ray placement group of the node that holds the worker's first bundle.
        bundle_index: That bundle's index in the group.
        share: Part of the accelerator that the worker reserves.
        node: Index of the node in the layout.
        bundles: All bundles of the worker, numbered through the layout.
    """

    placement_group: Any
    bundle_index: int
    share: float
    node: int
    bundles: tuple[int, ...]


@dataclass
class Cluster:
    """A connected cluster with the layout reserved in it.

    Attributes:
        layout: What is reserved.
        accelerator: The resource that a bundle is made of: `GPU`, or `CPU` as its stand-in.
        placement_groups: One a node of the layout.
        session_dir: Ray's session directory when the cluster runs on this machine alone, else `None`.
        local: Whether this run started the cluster.
        groups: The worker groups placed on the cluster. Each of them watches all of them, and they end with it.
        waited_on: Handles that coroutines wait for now, where an explanation may arrive when something fails.
    """

    layout: Layout
    accelerator: str
    placement_groups: list[Any]
    session_dir: Path | None
    local: bool
    groups: list[RayWorkerGroup] = field(default_factory=list)
    waited_on: list[Any] = field(default_factory=list)

    def slots(self, role: str) -> list[Slot]:
        """The places of a role's workers, in rank order."""
        role_layout = self.layout.roles.get(role)
        if role_layout is None:
            raise LayoutError(f"the layout has no role {role!r}; it has {sorted(self.layout.roles)}")
        slots = []
        for bundles in role_layout.workers:
            node = self.layout.node_of(bundles[0])
            index = bundles[0] - sum(self.layout.bundles_per_node[:node])
            slots.append(Slot(self.placement_groups[node], index, role_layout.share, node, bundles))
        return slots

    def num_threads(self, role: str, concurrent_roles: bool = False) -> int:
        """Compute threads for each worker: the machine's cores over the workers that compute at once, at least 1.

        Roles take turns in a synchronous run, so only the role's own workers count unless `concurrent_roles`.
        """
        roles = list(self.layout.roles) if concurrent_roles else [role]
        workers = [slot for name in roles for slot in self.slots(name)]
        # Nodes of the layout may share a machine: a local cluster is one machine.
        nodes = [0 if self.local else slot.node for slot in workers]
        return max(1, (os.cpu_count() or 1) // max(nodes.count(node) for node in set(nodes)))

    def stop_groups(self) -> None:
        """End all workers at once, without asking them."""
        for group in self.groups:
            group.kill()


@contextlib.contextmanager
def ray_cluster(
    layout: Layout,
    *,
    address: str | None = None,
    accelerator: str | None = None,
    num_cpus: int | None = None,
    further_cpus: float = 0.0,
    object_store_bytes: int = GiB,
    placement_timeout_s: float = 60.0,
    log_to_driver: bool = False,
    keep_logs_in: Path | None = None,
) -> Iterator[Cluster]:
    """Connect to a Ray cluster, or start a local one, and reserve the layout for the length of the `with` block.

    A local cluster and everything in it ends with the block, also on Ctrl-C and SIGTERM, and when the driver is
    killed. Must be entered from the thread that lives as long as the run.

    Args:
        layout: What to reserve.
        address: An existing cluster (`--ray-address`, also `auto`); without one a local cluster is started.
        accelerator: Resource to reserve; by default `GPU` where the cluster has any, otherwise `CPU` as a stand-in.
        num_cpus: CPUs that a local cluster offers; by default the machine's, and enough for the stand-in and for
            `further_cpus`.
        further_cpus: What workers outside of the layout will ask for.
        object_store_bytes: Shared memory for values in flight in a local cluster.
        placement_timeout_s: How long to wait for others to free what the layout needs.
        log_to_driver: Print the workers' output in this process.
        keep_logs_in: Copy a local cluster's worker logs into this directory at the end.

    Raises:
        ClusterError: if the cluster is too small, or stays too busy.
    """
    import ray

    if ray.is_initialized():
        raise ClusterError("Ray is already initialised in this process: call ray.shutdown() before the run")
    local = address is None
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_as_exit())
        stack.enter_context(_plain_ray(log_to_driver))
        env = {"PYTHONPATH": _worker_python_path()}
        common: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": "error"}
        temp_dir = stack.enter_context(_temp_dir(keep_logs_in)) if local else None
        stack.callback(ray.shutdown)
        if temp_dir is not None:
            num_cpus = num_cpus or max(os.cpu_count() or 1, layout.num_bundles + math.ceil(further_cpus))
            # The raylet hands its environment on to the workers, so those it starts ahead of time can be used.
            with _environment(env | {reaper.MARKER: str(temp_dir)}):
                _start_local(temp_dir, num_cpus=num_cpus, object_store_memory=object_store_bytes, **common)
        else:
            try:
                ray.init(address=address, runtime_env={"env_vars": env}, **common)
            except ConnectionError as error:
                raise ClusterError(
                    f"--ray-address {address}: no Ray cluster lets us in there ({error}). A cluster that wants a token "
                    "needs RAY_AUTH_MODE=token in the environment, and the token in ~/.ray/auth_token"
                ) from error
        # Ray has put its own handler in place: it exits with a code that says nothing.
        stack.enter_context(sigterm_as_exit())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        accelerator = accelerator or ("GPU" if any(node.get("GPU") for node in nodes) else "CPU")
        check_capacity(layout, [int(node.get(accelerator, 0)) for node in nodes], accelerator)
        groups = stack.enter_context(_reserved(layout, accelerator, placement_timeout_s))
        session_dir = (temp_dir / "session_latest").resolve() if temp_dir is not None else None
        cluster = Cluster(layout, accelerator, groups, session_dir, local)
        stack.callback(cluster.stop_groups)
        yield cluster


def check_capacity(layout: Layout, node_totals: Sequence[int], accelerator: str) -> None:
    """Refuse a layout that can never fit, whatever else runs on the cluster.

    Args:
        layout: What is to be reserved.
        node_totals: How many accelerators each machine has.
        accelerator: Their name, for the message.

    Raises:
        ClusterError: with the counts.
    """
    free = sorted(node_totals, reverse=True)
    for needed in sorted(layout.bundles_per_node, reverse=True):
        best = min((count for count in free if count >= needed), default=None)
        if best is None:
            raise ClusterError(
                f"the run needs {layout.num_bundles} {accelerator} ({_sum(layout.bundles_per_node)} by node), the "
                f"cluster has {sum(node_totals)} ({_sum(node_totals)} by node): lower --actor-num-nodes, "
                "--actor-num-gpus-per-node or --rollout-num-gpus, share them with --colocate, or use a larger cluster"
            )
        free[free.index(best)] -= needed


def _start_local(temp_dir: Path, **options: Any) -> None:
    """Start a cluster on this machine. Ray gives its daemons 30 s, which a busy machine may exceed: try twice."""
    import ray

    for last in (False, True):
        try:
            ray.init(address="local", include_dashboard=False, _temp_dir=str(temp_dir), **options)
            return
        except Exception as error:
            if last or "timed out" not in str(error):
                raise ClusterError(f"Ray did not start on this machine: {error}") from error
            ray.shutdown()
            reaper.end_marked(str(temp_dir))


@contextlib.contextmanager
def _reserved(layout: Layout, accelerator: str, timeout_s: float) -> Iterator[list[Any]]:
    """One placement group a node of the layout; largest first, so that small ones fill what is left."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    groups: dict[int, Any] = {}
    order = sorted(range(len(layout.bundles_per_node)), key=lambda node: -layout.bundles_per_node[node])
    try:
        for node in order:
            bundles = [{accelerator: 1}] * layout.bundles_per_node[node]
            groups[node] = placement_group(bundles, strategy="STRICT_PACK")
        deadline = time.monotonic() + timeout_s
        for group in groups.values():
            if not group.wait(max(0.1, deadline - time.monotonic())):
                free = ray.available_resources().get(accelerator, 0)
                raise ClusterError(
                    f"waited {timeout_s:.0f} s for {layout.num_bundles} {accelerator}: {free:g} of "
                    f"{ray.cluster_resources().get(accelerator, 0):g} are free now, others hold the rest"
                )
        yield [groups[node] for node in range(len(order))]
    finally:
        for group in groups.values():
            # After a lost connection there is nothing to give back.
            with contextlib.suppress(Exception):
                remove_placement_group(group)


@contextlib.contextmanager
def _temp_dir(keep_logs_in: Path | None) -> Iterator[Path]:
    """A directory for Ray's sockets and logs. It is removed, and what still runs in it ended, however this ends."""
    path = Path(tempfile.mkdtemp(prefix="tandem-ray-", dir=_TEMP_ROOT))
    process = reaper.start(path)
    assert process.stdin is not None
    try:
        yield path
    finally:
        if keep_logs_in is not None:
            _copy_logs(path / "session_latest" / "logs", keep_logs_in)
        process.stdin.close()
        process.wait()


def _copy_logs(logs: Path, target: Path) -> None:
    """Copy what the workers wrote, under their roles: `actor-0-pid4711.err`."""
    for out in logs.glob("worker-*.out"):
        with contextlib.suppress(OSError), out.open() as file:
            owner = re.search(r"^(\w+)\[(\d+)\] pid (\d+)$", file.read(4096), re.MULTILINE)
            for log in (out, out.with_suffix(".err")):
                if owner and log.is_file() and log.stat().st_size:
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(log, target / "{}-{}-pid{}{}".format(*owner.groups(), log.suffix))


@contextlib.contextmanager
def _plain_ray(log_to_driver: bool) -> Iterator[None]:
    """Two habits of Ray that no argument switches off, for the length of the run.

    Under `uv run` it copies the working directory into every worker and starts `uv` there: the workers use the
    driver's interpreter, which has the same packages. And its daemons print their view of a dead worker on the
    driver's stdout, whether workers' logs are wanted or not, in front of ours.
    """
    from ray._private import ray_constants, worker

    wanted = [
        (ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False),
        (worker, "_worker_logs_enabled", log_to_driver),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in wanted if hasattr(module, name)]
    for module, name, value in wanted:
        setattr(module, name, value)
    try:
        # Ray protects a local cluster with a token, and says so to later clusters through the environment.
        with _environment({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}, restore=("RAY_AUTH_MODE",)):
            yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def _environment(values: Mapping[str, str], restore: Sequence[str] = ()) -> Iterator[None]:
    """Set environment variables for the length of the block; those of `restore` may be changed by others in it."""
    before = {name: os.environ.get(name) for name in (*values, *restore)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _worker_python_path() -> str:
    """Where workers look for modules: where the driver does, so that hooks beside the user's script are found."""
    script_dir = sys.path[0] if sys.path and sys.path[0] else os.getcwd()
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(path for path in [os.getcwd(), script_dir, *inherited] if path))


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(str(count) for count in counts)
