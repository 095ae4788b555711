"""Stands in for SGLang's compiled kernels in servers that run on the CPU.

The real package loads CUDA libraries when it is imported. On the CPU SGLang takes pure torch paths and only imports
names from it, so every name is there and none does anything: calling one is an error. This folder is put on the
`PYTHONPATH` of CPU servers only, by :func:`shared_runtime.engines.sglang_server.server_environment`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import torch

from sgl_kernel._cpu_ops import register_cpu_ops

__version__ = "0.4.10"


class Placeholder:
    """A kernel, or a namespace of kernels, that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no CPU implementation here: this model needs a GPU")

    def __repr__(self) -> str:
        return f"<placeholder for {self._name}>"


def _placeholder(owner: str, name: str) -> Placeholder:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"{owner} has no attribute {name!r}")
    return Placeholder(f"{owner}.{name}")


class _PlaceholderModule(ModuleType):
    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self.__name__, name)


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Gives every `sgl_kernel.*` module as one of placeholders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes appear when they are asked for."""


def __getattr__(name: str) -> Placeholder:
    return _placeholder(__name__, name)


if torch.cuda.is_available():
    raise ImportError(f"{__file__} stands in for sgl_kernel on machines without a GPU: take it off PYTHONPATH")
# The diffusion engine calls this without asking when it goes to sleep.
torch.cuda.synchronize = lambda device=None: None
register_cpu_ops()
sys.meta_path.append(_SubmoduleFinder())
