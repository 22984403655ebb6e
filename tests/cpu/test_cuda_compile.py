"""The CUDA C++ kernel of layer_norm compiled by NVRTC, which needs no GPU: registers, spills, shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import BF16
from cases.compile_facts import nvidia_facts

pytest.importorskip("triton", reason="its package brings the tool that reads a cubin")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from onepass.launch.cuda import compile_kernel
from onepass.ops.activations import ACTIVATIONS
from onepass.ops.layer_norm import kernel_cuda
from onepass.ops.layer_norm.op import Desc

REGISTERS = 65536
LAUNCH_REGISTERS = 96
"""`LAUNCH_REGISTERS` of kernel_cuda.cu: with fewer, its warps would wait for registers for ever."""
SHARED_LIMIT = 227 << 10


def _desc(n: int, weight: bool, bias: bool, activation: str | None) -> Desc:
    wanted = (BF16 if weight else None, BF16 if bias else None)
    return Desc(torch.device("cuda", 0), BF16, *wanted, 100, n, activation, False, True, ())


@pytest.mark.parametrize("n", [16392, 32768, 50000, 65536, 102400, kernel_cuda.MAX_HIDDEN_SIZE])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (False, False)], ids=["affine", "plain"])
def test_layer_norm_of_long_rows(n: int, weight: bool, bias: bool) -> None:
    special = kernel_cuda.specialize(_desc(n, weight, bias, "silu"))
    cubin = compile_kernel(special, kernel_cuda.ARCH)
    facts = nvidia_facts(bytes(cubin.code), special.shared_bytes)
    assert facts.spilled_bytes == 0, facts
    # What the kernel's groups of warps move between them is taken from what the block is launched with.
    assert facts.registers == LAUNCH_REGISTERS, facts
    assert facts.registers * special.threads <= REGISTERS, facts
    assert facts.shared_bytes <= SHARED_LIMIT, facts


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_compiles(activation: str | None) -> None:
    special = kernel_cuda.specialize(_desc(32768, True, True, activation))
    facts = nvidia_facts(bytes(compile_kernel(special, kernel_cuda.ARCH).code), special.shared_bytes)
    assert facts.spilled_bytes == 0, facts


def test_the_source_is_beside_the_kernel() -> None:
    assert kernel_cuda.specialize(_desc(32768, True, True, None)).source == Path(kernel_cuda.__file__).with_suffix(
        ".cu"
    )
