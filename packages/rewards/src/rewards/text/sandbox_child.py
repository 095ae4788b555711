"""Inside the sandbox: lock this process down, then run the program. Started by path with `python -I`, alone.

The request comes as one JSON line on standard input: `source`, `tests`, `stdin` and `limits`. What is left of standard
input is the program's. The secret of the request goes to the report file once program and tests have run through, so a
program that merely exits has not passed.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
import types

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_PDEATHSIG, _SECCOMP_MODE_FILTER = 38, 22, 1, 2
_ALLOW, _ERRNO_EPERM, _ERRNO_ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LANDLOCK_WRITES, _LANDLOCK_TRUNCATE = 0x1FF2, 0x4000  # everything that changes files: write, remove, make
_LANDLOCK_READ, _LANDLOCK_LIST = 0x4, 0x8  # the content of files, the names in directories
_READABLE = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random",
    "/proc/self/maps", "/proc/self/stat", "/proc/self/statm", "/proc/self/status", "/proc/cpuinfo", "/proc/meminfo",
    "/sys/devices/system/cpu",
)  # fmt: skip
_CLONE_THREAD = 0x00010000
_SOCK_STREAM = 1
_CAPABILITIES_V3 = 0x20080522
_CAP_DAC_READ_SEARCH = 1 << 2  # a superuser's Python may lie in somebody else's home; Landlock still has its say
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Call numbers on x86_64 and on aarch64, which lacks the older of them.
_DENIED = {
    "socket": (41, 198), "connect": (42, 203), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    # Landlock does not watch over modes, owners, times and attributes of files.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "open_by_handle_at": (304, 265),
    # One flat directory: a deep tree is hard to measure and to remove.
    "mkdir": (83, None), "mkdirat": (258, 34),
    # What would stay behind: shared memory, queues, keys.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Limits and priorities of other processes; user namespaces, where this process would be the superuser.
    "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}  # fmt: skip
_LOOKED_INTO = {"clone": (56, 220), "clone3": (435, 435), "tgkill": (234, 131), "socketpair": (53, 199)}


def drop_capabilities() -> None:
    """Of a superuser's rights keep only the one to read."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITIES_V3, 0)
    held = ctypes.create_string_buffer(24)
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    permitted = struct.unpack("6I", held.raw)[1] & _CAP_DAC_READ_SEARCH
    if libc.capset(header, struct.pack("6I", permitted, permitted, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def deny_network_and_processes() -> None:
    """A seccomp filter: no sockets, no new processes (threads are fine), no hold on others or on what outlives this."""
    machine = platform.machine()
    column = tuple(_AUDIT).index(machine)
    clone, clone3, tgkill, socketpair = (numbers[column] for numbers in _LOOKED_INTO.values())
    deny, allow = (0x06, 0, 0, _ERRNO_EPERM), (0x06, 0, 0, _ALLOW)
    first_argument, second_argument = (0x20, 0, 0, 16), (0x20, 0, 0, 24)
    statements = [(0x20, 0, 0, 4), (0x15, 1, 0, _AUDIT[machine]), (0x06, 0, 0, _KILL), (0x20, 0, 0, 0)]
    if machine == "x86_64":
        statements += [(0x35, 0, 1, 0x40000000), deny]  # the x32 call numbers
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            statements += [(0x15, 0, 1, number), deny]
    statements += [(0x15, 0, 1, clone3), (0x06, 0, 0, _ERRNO_ENOSYS)]  # glibc then falls back to clone
    statements += [(0x15, 0, 4, clone), first_argument, (0x45, 1, 0, _CLONE_THREAD), deny, allow]
    statements += [(0x15, 0, 4, tgkill), first_argument, (0x15, 1, 0, os.getpid()), deny, allow]
    # asyncio needs a pair; datagram sockets could send to any local address.
    statements += [(0x15, 0, 4, socketpair), second_argument, (0x54, 0, 0, 0xF), (0x15, 1, 0, _SOCK_STREAM), deny]
    statements += [allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *statement) for statement in statements))
    program = struct.pack("HxxxxxxP", len(statements), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def confine_files(directory: str) -> bool:
    """Landlock rules: write in this directory only; read there, in Python's own directories and the system's libraries.

    Other processes' `/proc`, home directories and the like are thus out of sight, their names included. False where
    there is no Landlock.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    writes = _LANDLOCK_WRITES | (_LANDLOCK_TRUNCATE if version >= 3 else 0)
    ruleset = libc.syscall(
        444, ctypes.byref(ctypes.c_uint64(writes | _LANDLOCK_READ | _LANDLOCK_LIST)), ctypes.c_size_t(8), 0
    )
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = ruleset >= 0
    to_file = _LANDLOCK_READ | writes & (_LANDLOCK_TRUNCATE | 0x2)
    rules = dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix, *sys.path), _LANDLOCK_READ)
    rules |= {os.devnull: to_file, directory: writes | _LANDLOCK_READ}
    for path, allowed in rules.items():
        if not os.path.exists(path):
            continue
        allowed |= _LANDLOCK_LIST * os.path.isdir(path)
        descriptor = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
        done = done and libc.syscall(445, ruleset, 1, rule, 0) == 0
        os.close(descriptor)
    return bool(done and libc.syscall(446, ruleset, 0) == 0)


def limit_resources(limits: dict[str, int]) -> None:
    """Processor time, memory, file size, descriptors; no core files."""
    for name, value in {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_FSIZE": limits["output_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def main() -> None:
    """Read the request, lock down, run."""
    request = json.loads(sys.stdin.buffer.readline())
    secret, report = request.pop("secret"), os.open("report", os.O_WRONLY | os.O_CREAT, 0o600)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9)
    try:
        landlocked = confine_files(os.getcwd())
        limit_resources(request["limits"])
        drop_capabilities()
        deny_network_and_processes()
    except (OSError, KeyError, ValueError) as error:
        os.write(report, f"no sandbox: {error!r}".encode())
        return
    os.write(report, b"locked " if landlocked else b"files open ")
    sys.stdin = io.TextIOWrapper(io.BytesIO(request["stdin"].encode("utf-8", "surrogatepass")), encoding="utf-8")
    if run(request["source"], request["tests"]):
        sys.stdout.flush()
        os.write(report, secret.encode())


def run(source: str, tests: str | None) -> bool:
    """The program, then its tests in the same namespace. `sys.exit(0)` in the tests is `unittest.main`'s success."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where unittest looks for tests, and pickle for classes
    namespace = module.__dict__
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except SystemExit as stop:
        if tests is not None or stop.code not in (None, 0):
            return False
    if tests is not None:
        try:
            exec(compile(tests, "tests.py", "exec"), namespace)
        except SystemExit as stop:
            return stop.code in (None, 0, False)
    return True


if __name__ == "__main__":
    main()
