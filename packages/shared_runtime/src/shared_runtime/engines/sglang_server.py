"""What both of SGLang's servers, for language and for diffusion models, need around them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU_KERNELS = Path(__file__).with_name("cpu_kernels")
"""Holds the stand-in for `sgl_kernel` that CPU servers import."""

TESTED_VERSIONS = ("0.5.23",)
"""Releases of SGLang whose endpoints are the ones that this package calls."""


def check_installed(extra: str) -> None:
    """Find out whether SGLang is there, and the right one, without importing it.

    Args:
        extra: What to install for it: `tandem-llm-rl[sglang]`.

    Raises:
        ImportError: It is not installed.
        ValueError: It is a release with which this package has not been tested.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ImportError(f"--rollout-engine sglang needs SGLang: install {extra}") from None
    check_version(found)


def check_version(found: str, where: str = "") -> None:
    """Refuse a release whose endpoints may differ.

    Args:
        found: Its version.
        where: The server that says so, if it is one.

    Raises:
        ValueError: With the releases that work.
    """
    if found not in TESTED_VERSIONS:
        raise ValueError(
            f"{where}{': ' if where else ''}SGLang {found} has other endpoints than those this project calls; "
            f"it works with {', '.join(TESTED_VERSIONS)}"
        )


def server_environment(device: str) -> dict[str, str]:
    """Environment variables of a server process.

    Args:
        device: `cpu`, where the server runs on torch alone, or `cuda`, where it runs as it is.
    """
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    inherited = [entry for entry in inherited if entry != str(CPU_KERNELS)]
    if device != "cpu":
        return {"PYTHONPATH": os.pathsep.join(inherited)}
    return {
        "PYTHONPATH": os.pathsep.join([str(CPU_KERNELS), *inherited]),
        "SGLANG_USE_CPU_ENGINE": "1",
        # A GPU that this server does not use would bring the real kernels' paths in.
        "CUDA_VISIBLE_DEVICES": "",
    }
