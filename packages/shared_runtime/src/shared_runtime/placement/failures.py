"""Of several things that went wrong at once, find the one that caused the others, and say it well."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared_runtime.placement.ray_group import RayWorkerGroup


class WorkerDied(RuntimeError):
    """A worker's process ended while it was needed.

    Attributes:
        role: Role of its group.
        rank: Its index in the group.
        pid: Its process id, `None` if it died before it could tell.
    """

    def __init__(self, role: str, rank: int, pid: int | None, how: str, last_lines: Sequence[str] = ()) -> None:
        self.role, self.rank, self.pid = role, rank, pid
        text = f"{role} worker {rank} (pid {pid or 'unknown'}) died: {how}"
        if last_lines:
            text += "\nIts last lines on stderr:\n" + "\n".join(f"    {line}" for line in last_lines)
        super().__init__(text)


class Kind(IntEnum):
    """What a failure is, the most telling first."""

    RAISED = 0
    DIED = 1
    SECONDARY = 2


@dataclass(frozen=True)
class Failure:
    """One failed call, and the worker that it comes from."""

    kind: Kind
    error: Exception
    group: RayWorkerGroup
    rank: int


# What a rank says when another one has gone: it never is the reason itself.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|peer .*(gone|closed|exited)|\[[^\]]*gloo[^\]]*\]"
    r"|remote process exited|socket timeout|timed out waiting|nccl.*(abort|remote error)",
    re.IGNORECASE,
)
# The native handlers of Ray, glog and Python write one such line before the process ends.
_CRASH = re.compile(r"(\*\*\* SIG\w+.*|Fatal Python error: .*)")
# Ray's header over the traceback of each process that an exception passed, the place of origin last.
_ORIGIN = re.compile(r"repr=(\w+)\[(\d+)\]")


def origin(text: str) -> tuple[str, int] | None:
    """Role and rank of the worker that raised, from the text of Ray's exception."""
    found = _ORIGIN.findall(text)
    return (found[-1][0], int(found[-1][1])) if found else None


def pid_in(text: str) -> int | None:
    """The process id in Ray's report of a death."""
    found = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def classify(error: Exception) -> Kind:
    """Which kind of failure an exception from `ray.get` is."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return classify(cause)
        lost = isinstance(cause, RuntimeError | ConnectionError) and _PEER_GONE.search(str(cause))
        return Kind.SECONDARY if lost else Kind.RAISED
    return Kind.DIED if isinstance(error, RayError) else Kind.RAISED


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to report: an exception before a death, a death before a complaint about a lost peer."""
    return min(failures, key=lambda failure: failure.kind)


def how_it_died(error: Exception, last_lines: Sequence[str], oom_kills: int) -> str:
    """What is known of a process's end.

    Args:
        error: What Ray says.
        last_lines: The process's last lines on stderr.
        oom_kills: How many processes the kernel ended for want of memory since the group started.
    """
    from ray.exceptions import OutOfMemoryError

    text = str(error)
    crash = [match.group(1) for line in last_lines if (match := _CRASH.search(line))]
    if crash:
        return f"it crashed, {crash[0]}"
    if isinstance(error, OutOfMemoryError) or "memory monitor" in text:
        return "Ray ended it because the machine was running out of memory: use smaller batches or fewer workers"
    if oom_kills:
        return "killed (SIGKILL) by the kernel's out-of-memory killer: use smaller batches or fewer workers"
    if "INTENDED" in text or "exit()" in text:
        return "it called exit"
    if "node" in text and "died" in text and "its node" in text:
        return "its machine left the cluster"
    if "connection error" in text or "SIGKILL" in text or "End of file" in text:
        return "killed without a word, as by SIGKILL (kill -9, or an out-of-memory killer outside this machine's view)"
    return text.strip().splitlines()[-1] if text.strip() else "Ray gives no reason"
