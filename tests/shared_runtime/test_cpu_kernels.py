"""The stand-in for `sgl_kernel`, in a process that has it on its path as CPU servers do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shared_runtime.engines.http import call
from shared_runtime.engines.server_process import ServerProcess
from shared_runtime.engines.sglang_server import CPU_KERNELS, check_version, server_environment


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | server_environment("cpu"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_name_is_there_and_none_does_anything() -> None:
    run("""
import sgl_kernel, torch
from sgl_kernel.scalar_type import scalar_types
from sgl_kernel.deeply.nested import anything
from sgl_kernel import top_k_renorm_prob
assert sgl_kernel.__version__ == "0.4.10"
assert scalar_types.uint4b8 is not None
for call in (top_k_renorm_prob, anything, scalar_types.uint4b8):
    try:
        call(1, x=2)
    except NotImplementedError as error:
        assert "needs a GPU" in str(error)
    else:
        raise SystemExit(f"{call} did something")
for owner in (sgl_kernel, anything, sgl_kernel.scalar_type):
    assert not hasattr(owner, "__wrapped__")
for absent in ("convert_weight_packed", "shm_group_initialize"):
    assert not hasattr(torch.ops.sgl_kernel, absent), absent
torch.cuda.synchronize()
""")


def test_operators_against_float64() -> None:
    run("""
import torch, sgl_kernel
torch.manual_seed(0)
x, residual, gate, scale, shift = torch.randn(5, 2, 6, 8)
weight, bias = torch.randn(2, 8)
ops = torch.ops.sgl_kernel

def reference(x, weight, bias, norm):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = normed if weight is None else normed * weight
    normed = normed if bias is None or norm == "rms" else normed + bias
    return normed * (1 + scale.double()) + shift

for norm in ("layer", "rms"):
    for w, b in ((weight, bias), (None, None), (weight, None)):
        got = ops.fused_norm_scale_shift_cpu(x, w, b, scale, shift, norm, 1e-6)
        torch.testing.assert_close(got.double(), reference(x, w, b, norm), atol=1e-5, rtol=1e-5)
        for g in (gate, None):
            got, total = ops.fused_scale_residual_norm_scale_shift_cpu(
                residual, x, g, w, b, scale, shift, norm, 1e-6)
            expected = residual.double() + x.double() * (1 if g is None else g.double())
            torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(got.double(), reference(total, w, b, norm), atol=1e-5, rtol=1e-5)
half = ops.fused_norm_scale_shift_cpu(x.bfloat16(), None, None, scale, shift, "layer", 1e-6)
assert half.dtype == torch.bfloat16
torch.testing.assert_close(half.double(), reference(x.bfloat16(), None, None, "layer"), atol=2e-2, rtol=2e-2)
""")


def test_only_cpu_servers_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CPU_KERNELS), "/mine"]))
    assert server_environment("cuda") == {"PYTHONPATH": "/mine"}
    assert server_environment("cpu")["PYTHONPATH"] == os.pathsep.join([str(CPU_KERNELS), "/mine"])


def test_it_refuses_to_stand_where_there_is_a_gpu() -> None:
    run("""
import torch
torch.cuda.is_available = lambda: True
try:
    import sgl_kernel
except ImportError as error:
    assert "off PYTHONPATH" in str(error)
else:
    raise SystemExit("imported")
""")


def test_other_releases_are_named() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.1:30000: SGLang 0\.4\.2 .* works with 0\.5\.23"):
        check_version("0.4.2", "10.0.0.1:30000")


@pytest.mark.slow
def test_the_real_server_runs_on_it(sglang_server: ServerProcess) -> None:
    answer = call(
        f"{sglang_server.url}/generate",
        {"input_ids": [1, 3, 4], "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}},
        timeout_s=60,
    )
    assert len(answer["output_ids"]) == 5
