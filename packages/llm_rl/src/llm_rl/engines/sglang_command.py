"""The command line of an SGLang server for language models."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

CPU_DEFAULTS = {
    "--attention-backend": "torch_native",
    "--mem-fraction-static": "0.2",
    "--max-total-tokens": "20000",
}
"""What runs without a GPU, unless the user says otherwise."""


def server_command(
    model_dir: str | Path,
    ports: Sequence[int],
    *,
    dtype: str,
    device: str,
    tp_size: int = 1,
    extra: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> list[str]:
    """The command that serves a model.

    Args:
        model_dir: Hugging Face directory.
        ports: Of the HTTP server and of the ranks' rendezvous.
        dtype: `fp32` or `bf16`.
        device: `cpu` or `cuda`.
        tp_size: GPUs of the engine.
        extra: The user's own words (`--mem-fraction-static 0.7`).
        defaults: Flags and values that `extra` may replace; by default those of the device.
    """
    if defaults is None:
        defaults = CPU_DEFAULTS if device == "cpu" else {}
    given = {word.split("=", 1)[0] for word in extra}
    chosen = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model_dir), "--dtype", _DTYPES[dtype], "--device", device),
        *("--host", "127.0.0.1", "--port", str(ports[0]), "--nccl-port", str(ports[1])),
        *("--tp-size", str(tp_size)),
        # A prompt of SGLang's own, in words that the tokenizer may not have.
        "--skip-server-warmup",
        *chosen,
        *extra,
    ]
