"""Plain copy and read kernels in Triton: 16 bytes a load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onepass.launch.triton import Specialization, load, pointer

BLOCK_BYTES = 4096
NUM_WARPS = 4

READ_BYTES = 32768
"""What a program of the read kernel reads, in blocks of READ_BLOCK."""
READ_BLOCK = 16384


@triton.jit
def copy_kernel(target_ptr, source_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=mask), mask=mask)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor into another of its shape and dtype, both aligned to 16 bytes."""
    count, block = source.numel(), BLOCK_BYTES // source.element_size()
    aligned = (0, 1, 2) if count % 16 == 0 else (0, 1)
    special = Specialization((*(pointer(source.dtype),) * 2, "i64"), (block,), aligned, NUM_WARPS, pdl=False)
    load(copy_kernel, special, source.device)(-(-count // block), (target, source), count)


@triton.jit
def read_kernel(sums_ptr, source_ptr, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The sum of BLOCKS blocks a program: something has to become of what is read."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read_programs(source: torch.Tensor) -> int:
    return -(-source.nbytes // READ_BYTES)


def read(sums: torch.Tensor, source: torch.Tensor) -> None:
    """Read a contiguous tensor that is aligned to 16 bytes; `sums` has `read_programs(source)` float32."""
    count, block = source.numel(), READ_BLOCK // source.element_size()
    aligned = (0, 1, 2) if count % 16 == 0 else (0, 1)
    types = (pointer(torch.float32), pointer(source.dtype), "i64")
    special = Specialization(types, (block, READ_BYTES // READ_BLOCK), aligned, NUM_WARPS, pdl=False)
    load(read_kernel, special, source.device)(read_programs(source), (sums, source), count)
