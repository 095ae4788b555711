"""Environment and fixtures of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports torch, transformers, ray or matplotlib. Workers and subprocesses inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DISABLE_IMPORT_WARNING="1",
)
# Without compiled modules every process that a test starts would compile torch and Ray anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Several torch processes on few cores are many times slower with a thread pool each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # the helpers that lie beside this file

import pytest

if TYPE_CHECKING:
    from shared_runtime.engines.server_process import ServerProcess


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the `tiny` preset with its tokenizer, as a Hugging Face directory. Don't write into it."""
    from llm_rl.presets.tiny import write_model

    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return directory


@pytest.fixture(scope="session")
def sglang_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real SGLang server of the tiny model on the CPU, for all tests. Whoever changes its weights puts them back."""
    from llm_rl.engines.sglang_command import server_command
    from shared_runtime.engines.server_process import ServerProcess
    from shared_runtime.engines.sglang_server import server_environment

    server = ServerProcess(
        "the SGLang server of the tests",
        lambda ports: server_command(tiny_model_dir, ports, dtype="fp32", device="cpu"),
        log=tmp_path_factory.mktemp("sglang") / "server.log",
        num_ports=2,
        env=server_environment("cpu"),
    )
    try:
        server.wait_ready(timeout_s=400)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module", autouse=True)
def _process_group_is_closed() -> Iterator[None]:
    """A module that leaves its process group open fails itself: collectives of a forked child would wait for ever."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this module left a process group open: close its trainers")


@pytest.fixture(scope="module", autouse=True)
def _ray_is_shut_down() -> Iterator[None]:
    """A module that leaves Ray running fails itself instead of the next one that starts a cluster."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        ray.shutdown()
        pytest.fail("this module left Ray initialised: end its cluster in a fixture")
