"""How a Triton kernel that reduces rows is shaped. It depends on N and x's dtype alone, never on the number of rows.

That is what makes a row's bits independent of its batch, and what keeps a new batch size from compiling anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WARP_SIZE = 32
WARP_BYTES = 16 * WARP_SIZE
"""What a warp loads at once: 16 bytes a lane."""

MAX_RESIDENT = 16384
"""Longest row kept in registers: 32 elements a thread in 16 warps."""


class Config(NamedTuple):
    """One shape of the kernel."""

    block: int
    """Columns a program loads at a time; a power of two."""
    chunks: int
    """Blocks of a row that stay in registers; 0: the row is too long, and is read a second time from the L2."""
    rows: int
    """Rows per program; a power of two."""
    num_warps: int


def heuristic(hidden_size: int, element_size: int) -> Config:
    """The default config: about 32 elements a thread, 16 bytes a load, few idle lanes in the last block.

    A short row takes one warp, or part of one, and a program takes at least two: what it moves then outlasts the
    launch of another program (1.2 ns apiece on an H200 under programmatic dependent launch).
    """
    if hidden_size > MAX_RESIDENT:
        return Config(block=8192 // (element_size // 2), chunks=0, rows=1, num_warps=16)
    warp_block = WARP_BYTES // element_size
    if hidden_size <= 4 * warp_block:
        block = min(warp_block, max(16, _power_of_two(hidden_size)))
        chunks = -(-hidden_size // block)
        rows = _power_of_two(4 * warp_block // (block * chunks))
        if block <= 32:
            rows //= 2  # the compiler for sm_90 spills a few of so many rows, though it has registers left
        return Config(block, chunks, rows=max(2, rows), num_warps=1)
    return min(_resident(hidden_size, warp_block), key=lambda c: _cost(c, hidden_size))


def candidates(hidden_size: int, element_size: int) -> list[Config]:
    """What the tuner tries: every valid config around the heuristic's."""
    warp_block = WARP_BYTES // element_size
    default = heuristic(hidden_size, element_size)
    found = {default}
    if hidden_size <= 4 * warp_block:
        found.update(default._replace(rows=rows) for rows in (1, 2, 4, 8, 16, 32))
    if hidden_size > warp_block:
        for config in _resident(hidden_size, warp_block):
            found.update(config._replace(rows=rows) for rows in (1, 2, 4))
    if hidden_size >= MAX_RESIDENT:
        for num_warps in (8, 16, 32):
            for per_thread in (8, 16, 32):
                found.add(Config(num_warps * WARP_SIZE * per_thread, 0, 1, num_warps))
    return sorted(c for c in found if is_valid(c, hidden_size))


def is_valid(config: Config, hidden_size: int) -> bool:
    """Whether the config covers the row and keeps at most 64 elements a thread."""
    block, chunks, rows, num_warps = config
    if any(v & (v - 1) or v < 1 for v in (block, rows, num_warps)) or num_warps > 32:
        return False
    if chunks == 0:
        return rows == 1 and block <= hidden_size
    covers = (chunks - 1) * block < hidden_size <= chunks * block
    return covers and rows * chunks * block <= 64 * WARP_SIZE * num_warps


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _resident(hidden_size: int, warp_block: int) -> Iterator[Config]:
    for num_warps in (1, 2, 4, 8, 16):
        block = warp_block * num_warps
        chunks = -(-hidden_size // block)
        if chunks * block <= 64 * WARP_SIZE * num_warps and block < 2 * hidden_size:
            yield Config(block, chunks, 1, num_warps)


def _cost(config: Config, hidden_size: int) -> float:
    """Share of idle lanes, plus the distance (in doublings) from 32 elements a thread."""
    covered = config.block * config.chunks
    per_thread = covered / (config.num_warps * WARP_SIZE)
    doublings = per_thread / 32 if per_thread > 32 else 32 / per_thread
    return covered / hidden_size + 0.15 * doublings
