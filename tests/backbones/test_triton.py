"""What is Triton's alone; test_bidirectional.py has what holds for all kernels of a bidirectional mixer.

They run on the CPU by Triton's interpreter, which conftest.py asks for; TRITON_INTERPRET=0 runs them on a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from backbones.ops import Directions, causal_conv_reference, gated_rms_norm

pytest.importorskip("triton")  # torch brings it on Linux only
from backbones.ops import triton_conv, triton_norm, triton_ssd
from tests.backbones.test_bidirectional import DEVICE, both, close, inputs
from tests.tiny_runs import ROOT


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)], ids=str)
@pytest.mark.parametrize("length", [23, 69])
def test_half_precision(length, dtype, tolerance):
    close(*both("triton", length, dtype=dtype), tolerance)


def test_heads_one_by_one_or_together(monkeypatch):
    """How many heads a program takes is the device's matter, not the result's."""
    _, (y, together), _ = both("triton", 34, heads=4)
    monkeypatch.setattr(triton_ssd, "_heads_of_a_program", lambda *_: 1)
    _, (same, apart), _ = both("triton", 34, heads=4)
    assert torch.equal(y, same)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_convolution():
    tensors, _ = inputs(21)
    _, xBC, _ = Directions(*tensors[1:]).parts(tensors[0])
    weight, bias = tensors[1:3]
    out = triton_conv.conv_silu(xBC, weight, bias)
    for i, ends in enumerate((lambda t: t, lambda t: t.flip(1))):
        expected = ends(F.silu(causal_conv_reference(ends(xBC), weight[i].t(), bias[i])))
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


def test_norm():
    tensors, _ = inputs(21, groups=2)
    z, *_ = Directions(*tensors[1:]).parts(tensors[0])
    y, weight = torch.randn(2, *z.shape, device=DEVICE), tensors[6]
    expected = sum(gated_rms_norm(y[i], z, weight[i], 1e-5, 2) for i in range(2)) / 2
    torch.testing.assert_close(triton_norm.mean_gated_norm(y, z, weight, 1e-5, 2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_kernels_compile_for_an_h100_and_keep_to_its_registers():
    """By Triton's own compiler and ptxas, which need no GPU: at most 64 bytes a thread are spilled."""
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import kernel_registers as k\n"
        "for name, *kernel in k.kernels(): print(*k.usage(k.compiled(*kernel).asm['cubin']), name)"
    )
    env = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found = [line.split(maxsplit=2) for line in run.stdout.splitlines()]
    assert len(found) == 9 and all(int(stack) <= 64 for _, stack, _ in found), run.stdout
