"""The worker's side of a Ray group: an actor that holds one object and calls its methods."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet.

    Attributes:
        host: Address of rank 0, as the other ranks reach it.
        port: Port of the store that rank 0 already serves: nobody else can take it in between.
    """

    host: str
    port: int


@dataclass(frozen=True)
class WorkerProcess:
    """What the driver needs to know of a worker's process."""

    pid: int
    hostname: str


@dataclass(frozen=True)
class HostSettings:
    """What one worker is told at its start.

    Attributes:
        role: Role of its group.
        rank: Its index in the group.
        world_size: Size of the group.
        local_world_size: Workers of the group on the same node.
        env: Environment variables, set before the worker's class (and with it torch) is imported.
    """

    role: str
    rank: int
    world_size: int
    local_world_size: int
    env: dict[str, str] = field(default_factory=dict)


class WorkerHost:
    """A Ray actor around one worker object. Methods run one at a time, in the main thread, in the order of arrival."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._worker: Any = None
        self._store: Any = None
        os.environ.update(settings.env)

    def __repr__(self) -> str:
        """Ray writes this into the traceback of an exception and in front of printed lines."""
        return f"{self._settings.role}[{self._settings.rank}]"

    def open_store(self, one_machine: bool) -> Rendezvous:
        """Serve the group's store on a port that the kernel chooses; rank 0 only."""
        from torch.distributed import TCPStore

        host = "127.0.0.1" if one_machine else socket.gethostbyname(socket.gethostname())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return Rendezvous(host, self._store.port)

    def build(
        self, pickled_class: bytes, rendezvous: Rendezvous | None, names: list[str], *values: Any
    ) -> WorkerProcess:
        """Make the worker object.

        With a rendezvous, `torch.distributed.init_process_group(backend)` then works as under `torchrun`. The device
        is the first visible one on every rank, hence `LOCAL_RANK=0`.
        """
        if rendezvous is not None:
            os.environ.update(
                MASTER_ADDR=rendezvous.host,
                MASTER_PORT=str(rendezvous.port),
                RANK=str(self._settings.rank),
                WORLD_SIZE=str(self._settings.world_size),
                LOCAL_RANK="0",
                LOCAL_WORLD_SIZE=str(self._settings.local_world_size),
                # Every rank, 0 included, is a client of the store that is already there.
                TORCHELASTIC_USE_AGENT_STORE="True",
            )
            if rendezvous.host == "127.0.0.1":
                # Gloo would look the machine's name up, which need not resolve.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from ray import cloudpickle

        # The worker's log begins with whose it is.
        print(f"{self!r} pid {os.getpid()}", flush=True)
        worker_class = cloudpickle.loads(pickled_class)
        self._worker = worker_class(**dict(zip(names, values, strict=True)))
        return WorkerProcess(os.getpid(), socket.gethostname())

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker object."""
        return getattr(self._worker, method)(*args)

    def close(self) -> None:
        """Let the worker object tidy up."""
        close = getattr(self._worker, "shutdown", None)
        if close is not None:
            close()

    def ping(self) -> None:
        """Answer when the methods before it are done; fails at once when the process has died."""
