"""How a call of paged_attention is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onepass.ops.paged_attention.op import Desc


MANY_CHUNKS = 1024
"""From here on a program has a run: measured on an H200 with 132 multiprocessors, 75 against 92 µs at 2048 chunks, and
23 against 18 at 256."""


@dataclass(frozen=True)
class Config:
    """`chunk` and `run` fix the order of all sums, so they depend on sizes that a model fixes, and on q_len.

    A part is what one program writes: one chunk, or one run.
    """

    block_m: int
    """Rows (queries and the q heads of a group) of a program."""
    block_n: int
    """Keys at a time."""
    chunk: int
    """Keys that are attended to before their result is added to the others'."""
    run: int
    """Chunks that are added up before they are added to others."""
    part: int
    """Chunks of a part: 1 or `run`."""
    num_warps: int
    num_stages: int

    def num_parts(self, desc: Desc) -> int:
        return max(1, -(-desc.max_pages * desc.page_size // (self.chunk * self.part)))

    def row_blocks(self, desc: Desc) -> int:
        return -(-desc.q_len * (desc.num_q_heads // desc.num_kv_heads) // self.block_m)


def heuristic(desc: Desc) -> Config:
    rows = desc.q_len * (desc.num_q_heads // desc.num_kv_heads)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    row_bytes = desc.head_dim * desc.dtype.itemsize
    block_n = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    if not desc.aligned:  # an element a load: fewer at a time, or registers run out
        block_n = min(block_n, 32)
    # As many programs for many queries as for one.
    blocks = -(-rows // block_m)
    chunk = 256 * (1 << (blocks - 1).bit_length())
    run = 4
    programs = desc.batch * desc.num_kv_heads * blocks * -(-desc.max_pages * desc.page_size // chunk)
    part = run if programs >= MANY_CHUNKS and desc.device.type != "cpu" else 1
    # Where four warps would run out of registers: many rows, a conversion, a load for each element.
    wide = block_m == 64 or desc.cache_dtype.itemsize == 1 or not desc.aligned
    return Config(block_m, block_n, chunk, run, part, 8 if wide else 4, 3)


def partial_elements(desc: Desc) -> int:
    """Float32 elements of the partial results: sums, and for each their largest score and sum of weights."""
    rows = desc.batch * desc.num_q_heads * desc.q_len
    return rows * heuristic(desc).num_parts(desc) * (desc.head_dim + 2)
