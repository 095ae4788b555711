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
_LANDLOCK_READ = 0x4  # the content of files
_READABLE = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
)  # fmt: skip
_CLONE_THREAD = 0x00010000
# The audit number of the architecture, then call numbers.
# Denied: socket, connect, (fork, vfork,) ptrace, process_vm_readv and _writev, io_uring_setup, kill, tkill,
# rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, prlimit64. Looked into: clone, clone3, tgkill.
_CALLS = {
    "x86_64": (0xC000003E, (41, 42, 57, 58, 101, 310, 311, 425, 62, 200, 129, 297, 424, 302), (56, 435, 234)),
    "aarch64": (0xC00000B7, (198, 203, 117, 270, 271, 425, 129, 130, 138, 240, 424, 261), (220, 435, 131)),
}


def deny_network_and_processes() -> None:
    """A seccomp filter: no sockets, no new processes (threads are fine), no signals to others, no tracing."""
    audit, denied, (clone, clone3, tgkill) = _CALLS[platform.machine()]
    deny, load_first_argument = (0x06, 0, 0, _ERRNO_EPERM), (0x20, 0, 0, 16)
    statements = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, _KILL), (0x20, 0, 0, 0)]
    if platform.machine() == "x86_64":
        statements += [(0x35, 0, 1, 0x40000000), deny]  # the x32 call numbers
    for call in denied:
        statements += [(0x15, 0, 1, call), deny]
    statements += [(0x15, 0, 1, clone3), (0x06, 0, 0, _ERRNO_ENOSYS)]  # glibc then falls back to clone
    statements += [(0x15, 0, 4, clone), load_first_argument, (0x45, 1, 0, _CLONE_THREAD), deny, (0x06, 0, 0, _ALLOW)]
    statements += [(0x15, 0, 3, tgkill), load_first_argument, (0x15, 1, 0, os.getpid()), deny]
    statements += [(0x06, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *statement) for statement in statements))
    program = struct.pack("HxxxxxxP", len(statements), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def confine_files(directory: str) -> bool:
    """Landlock rules: write in this directory only; read there, in Python's own directories and the system's libraries.

    Other processes' `/proc`, home directories and the like are thus out of sight. False where there is no Landlock.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    writes = _LANDLOCK_WRITES | (_LANDLOCK_TRUNCATE if version >= 3 else 0)
    ruleset = libc.syscall(444, ctypes.byref(ctypes.c_uint64(writes | _LANDLOCK_READ)), ctypes.c_size_t(8), 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = ruleset >= 0
    to_file = _LANDLOCK_READ | writes & (_LANDLOCK_TRUNCATE | 0x2)
    rules = dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix, *sys.path), _LANDLOCK_READ)
    rules |= {os.devnull: to_file, directory: writes | _LANDLOCK_READ}
    for path, allowed in rules.items():
        if not os.path.exists(path):
            continue
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
