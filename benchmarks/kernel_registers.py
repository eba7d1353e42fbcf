"""What the compiler makes of the Triton kernels at Vim-B's sizes in bfloat16 on an H100: needs no GPU.

Registers and bytes spilled of a thread, shared memory of a program, and global loads of 16 bytes among all loads.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from measuring import report
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backbones.ops import triton_conv, triton_norm, triton_ssd

BATCH, INNER, HEADDIM, STATE = 64, 1536, 64, 64
HEADS, CHANNELS = INNER // HEADDIM, INNER + 2 * STATE
LOW = {"xBC", "dt", "y", "dy", "dxBC", "x", "out", "grad", "dx", "z", "dz"}
WHOLE = {"length", "tokens"}


def kernels() -> list[tuple[str, Any, dict[str, Any]]]:
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for length in (37, 198):
        rows = torch.empty(BATCH, length, INNER + CHANNELS + HEADS, dtype=torch.bfloat16, device="meta")
        xBC, dt = rows.new_empty(2, BATCH, length, CHANNELS), rows[..., -HEADS:]
        for kernel, launch, more in (
            (triton_ssd._forward_kernel, triton_ssd.FORWARD, {}),
            (triton_ssd._backward_kernel, triton_ssd.BACKWARD, {"EACH": 4}),
        ):
            sizes = triton_ssd._sizes(xBC, dt, HEADDIM, STATE, 1, launch)
            found.append((f"ssd{kernel.__name__}, {length} tokens", kernel, sizes | more | {"EMULATED": False}))
    z, x = rows[..., :INNER], rows[..., INNER:-HEADS]
    norm = triton_norm._sizes(z, 1)
    backward = norm | {"DZ_STRIDE": norm["STRIDE"], "ROWS": triton_norm.ROWS}
    found += [("norm_forward_kernel", triton_norm._forward_kernel, norm)]
    found += [("norm_backward_kernel", triton_norm._backward_kernel, backward)]
    convolutions = (triton_conv._forward_kernel, triton_conv._pre_activation_kernel, triton_conv._input_kernel)
    return found + [(f"conv{k.__name__}", k, triton_conv._sizes(x, 4)) for k in convolutions]


def compiled(kernel: Any, sizes: dict[str, Any]) -> Any:
    sizes = dict(sizes)
    warps = sizes.pop("num_warps", 4)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in sizes:
            signature[name] = "constexpr"
        elif name in WHOLE or name == "eps":
            signature[name] = "i32" if name in WHOLE else "fp32"
        else:
            signature[name] = "*bf16" if name in LOW else "*fp32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def usage(cubin: bytes) -> tuple[str, str]:
    """Registers and stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return found[1], found[2]


def main() -> None:
    rows = []
    for name, kernel, sizes in kernels():
        binary = compiled(kernel, sizes)
        ptx = binary.asm["ptx"]
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*\], (\w+)", ptx)
        wide = ptx.count("ld.global.v4") + sum(int(size, 0) == 16 for size in copies)
        loads = f"{wide} of {ptx.count('ld.global') + len(copies)}"
        launch = f"{sizes.get('BLOCK', sizes.get('ROWS'))}, {sizes.get('num_warps', 4)}"
        rows.append([name, launch, *usage(binary.asm["cubin"]), str(binary.metadata.shared), loads])
    header = ["kernel", "block, warps", "registers", "bytes spilled", "shared bytes", "loads of 16 bytes"]
    report("kernel_registers", header, rows, f"For sm_90 by Triton {triton.__version__}; Vim-B, bfloat16.")


if __name__ == "__main__":
    main()
