"""The CUDA C++ kernel of qkv_proj compiled by NVRTC, which needs no GPU: registers, spills, shared memory."""

from __future__ import annotations

import pytest
from cases import BF16
from cases.compile_facts import nvidia_facts
from cases.qkv_proj import desc
from cases.rope_inputs import LLAMA, SMOL, Model

pytest.importorskip("triton", reason="its package brings the tool that reads a cubin")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from onepass.launch.cuda import compile_kernel
from onepass.ops.qkv_proj import kernel_cuda

REGISTERS, SHARED_LIMIT, MULTIPROCESSORS = 65536, 227 << 10, 132
CASES = {
    "llama-3-8b-1": (1, 4096, LLAMA),
    "llama-3-8b-16": (16, 4096, LLAMA),
    "llama-3-70b-16": (16, 8192, Model(64, 8, 128, 128)),
    "smollm2-1": (1, 576, SMOL),
    "head-256-2": (2, 2048, Model(8, 1, 256, 64)),
    "odd-hidden-9": (9, 1000, Model(4, 2, 80, 32)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("everything", [False, True])
def test_no_spills(name: str, everything: bool) -> None:
    more = {"bias_dtype": BF16, "has_offset": True, "interleaved": True} if everything else {}
    special = kernel_cuda.specialize(desc(*CASES[name], **more), MULTIPROCESSORS)
    facts = nvidia_facts(bytes(compile_kernel(special, kernel_cuda.ARCH).code), special.shared_bytes)
    assert facts.spilled_bytes == 0, facts
    assert facts.registers * special.threads <= REGISTERS, facts
    assert facts.shared_bytes <= SHARED_LIMIT, facts
    assert any(opcode.startswith("LDG") and "128" in opcode for opcode in facts.memory_opcodes), facts


def test_every_multiprocessor_has_a_block() -> None:
    """Llama-3-8B's 384 tiles in threes: 128 blocks for 132 multiprocessors."""
    assert kernel_cuda.tiles_of(desc(1, 4096, LLAMA), MULTIPROCESSORS) == 3
    assert kernel_cuda.tiles_of(desc(1, 576, SMOL), MULTIPROCESSORS) == 1
