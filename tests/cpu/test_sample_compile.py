"""The CUDA C++ kernel of sample compiled by NVRTC, which needs no GPU: registers, spills, shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import BF16, FP16, FP32
from cases.compile_facts import nvidia_facts

pytest.importorskip("triton", reason="its package brings the tool that reads a cubin")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from onepass.launch.cuda import compile_kernel
from onepass.ops.sample import kernel_cuda
from onepass.ops.sample.op import Desc
from onepass.ops.sample.spec import VOCAB_LLAMA_3

REGISTERS = 65536


def _desc(num_rows: int, vocab_size: int, dtype: torch.dtype, top_k_dtype: torch.dtype = torch.int64) -> Desc:
    return Desc(torch.device("cuda", 0), dtype, num_rows, vocab_size, top_k_dtype, True, ())


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "top_k_dtype"),
    [
        (VOCAB_LLAMA_3, FP32, torch.int64),
        (VOCAB_LLAMA_3, BF16, torch.int64),
        (VOCAB_LLAMA_3, FP16, torch.int32),
        (151936, FP32, torch.int32),
        (1000, BF16, torch.int64),
        (600_000, FP32, torch.int64),
    ],
)
def test_sample(num_rows: int, vocab_size: int, dtype: torch.dtype, top_k_dtype: torch.dtype) -> None:
    desc = _desc(num_rows, vocab_size, dtype, top_k_dtype)
    special = kernel_cuda.specialize(desc, kernel_cuda.shape_for(desc))
    facts = nvidia_facts(bytes(compile_kernel(special, kernel_cuda.ARCH).code), special.shared_bytes)
    assert facts.spilled_bytes == 0, facts
    assert facts.registers * special.threads <= REGISTERS, facts
    assert facts.shared_bytes <= kernel_cuda.SHARED_LIMIT, facts


def test_two_blocks_of_many_rows_share_a_multiprocessor() -> None:
    for vocab_size in (VOCAB_LLAMA_3, 151936):
        desc = _desc(64, vocab_size, FP32)
        special = kernel_cuda.specialize(desc, kernel_cuda.shape_for(desc))
        facts = nvidia_facts(bytes(compile_kernel(special, kernel_cuda.ARCH).code), special.shared_bytes)
        assert 2 * facts.registers * special.threads <= REGISTERS, facts
        assert 2 * (special.shared_bytes + 1024) <= 228 << 10


def test_the_source_is_beside_the_kernel() -> None:
    desc = _desc(1, 1000, FP32)
    source = kernel_cuda.specialize(desc, kernel_cuda.shape_for(desc)).source
    assert source == Path(kernel_cuda.__file__).with_suffix(".cu")


@pytest.mark.parametrize("shape", [kernel_cuda.Shape(16, 512), kernel_cuda.Shape(8, 512), kernel_cuda.Shape(4, 1024)])
def test_a_cluster_has_room_for_every_token(shape: kernel_cuda.Shape) -> None:
    for vocab_size in (1, 111, 128, VOCAB_LLAMA_3, 151936):
        room = shape.cluster * shape.threads * 4 * shape.steps(vocab_size)
        assert vocab_size <= room < vocab_size + shape.cluster * shape.threads * 4
