"""The CUDA C++ kernel of softmax compiled by NVRTC, which needs no GPU: registers, spills, shared memory."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32
from cases.compile_facts import nvidia_facts

pytest.importorskip("triton", reason="its package brings the tool that reads a cubin")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from onepass.launch.cuda import compile_kernel
from onepass.ops.softmax import kernel_cuda
from onepass.ops.softmax.op import Desc

REGISTERS = 65536


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(16392, BF16), (49152, FP16), (128256, FP32), (128256, BF16), (151936, FP32), (kernel_cuda.MAX_VOCAB_SIZE, FP32)],
)
@pytest.mark.parametrize("per_row", [False, True], ids=["one", "per-row"])
@pytest.mark.parametrize("num_rows", [1, 256])
def test_a_row_in_registers(n: int, dtype: torch.dtype, per_row: bool, num_rows: int) -> None:
    special = kernel_cuda.specialize(Desc(torch.device("cuda", 0), dtype, num_rows, n, per_row, per_row, True, ()))
    facts = nvidia_facts(bytes(compile_kernel(special, kernel_cuda.ARCH).code), special.shared_bytes)
    assert facts.spilled_bytes == 0, facts
    assert facts.registers * special.threads <= REGISTERS, facts
    assert any("128" in opcode for opcode in facts.memory_opcodes if "LDG" in opcode), facts
    assert any("128" in opcode for opcode in facts.memory_opcodes if "STG" in opcode), facts
    macros = dict(special.macros)
    assert macros["THREADS"] * macros["CLUSTER"] * kernel_cuda.ELEMENTS >= n
    assert special.threads <= 1024


@pytest.mark.parametrize("n", [16392, 49152, 128256, 151936, kernel_cuda.MAX_VOCAB_SIZE])
def test_both_shapes_of_a_cluster_hold_the_same_elements(n: int) -> None:
    few, many = (
        dict(kernel_cuda.specialize(Desc(torch.device("cuda", 0), BF16, rows, n, False, False, True, ())).macros)
        for rows in (1, 256)
    )
    assert few["CLUSTER"] * few["THREADS"] == many["CLUSTER"] * many["THREADS"]
