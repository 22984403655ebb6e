"""How the Triton kernel is shaped: by head_dim, dtype and what a block may have of shared memory.

Never by the number or the length of sequences: a row's bits depend on BLOCK_N. Each shape is the largest that needs no
registers spilled to memory, by compiling; those of sm_90 are also the fastest of four that were measured.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_HEAD_DIM = 256


class Config(NamedTuple):
    """One shape of the kernel."""

    block_m: int
    """Queries a program."""
    block_n: int
    """Keys and values it holds at a time."""
    num_warps: int
    num_stages: int


def block_d(head_dim: int) -> int:
    """head_dim padded to a power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def heuristic(head_dim: int, element_size: int, shared_bytes: int, warpgroups: bool) -> Config:
    """The default config. `warpgroups`: four warps multiply together (wgmma), out of shared memory."""
    padded = block_d(head_dim)
    if element_size == 4:
        return _float32(padded, shared_bytes)
    if warpgroups:
        return _warpgroups(padded)
    if shared_bytes < 99 << 10:
        return Config(128, 64, 4, 1) if padded <= 128 else Config(64, 32, 4, 1)
    stages = 3 if shared_bytes >= 160 << 10 else 2
    if padded == 128:
        return Config(128, 32, 8, stages) if stages == 3 else Config(64, 32, 4, stages)
    return Config(128, 64, 8, stages) if padded <= 64 else Config(64, 32, 8, stages)


def _warpgroups(padded: int) -> Config:
    if padded > 128:
        return Config(128, 32, 8, 2)
    return Config(128, 64, 4 if padded <= 64 else 8, 3)


def _float32(padded: int, shared_bytes: int) -> Config:
    """Multiplied one by one, not by matrix units: both operands of a step lie in registers."""
    stages, num_warps = (2, 16) if shared_bytes >= 99 << 10 else (1, 8)
    if padded <= 64:
        return Config(64, 32, 8, stages)
    return Config(32, 16, 8 if padded == 128 else num_warps, stages)
