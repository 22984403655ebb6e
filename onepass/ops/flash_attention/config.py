"""How the Triton kernel is shaped: by head_dim, dtype and what a block may have of shared memory.

Never by the number or the length of sequences: a row's bits depend on BLOCK_N.
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
        return {16: Config(128, 128, 8, 3), 32: Config(128, 128, 8, 3), 64: Config(128, 128, 8, 3)}.get(
            padded, Config(128, 128, 8, 2) if padded == 128 else Config(128, 64, 8, 2)
        )
    if shared_bytes < 99 << 10:
        return Config(128, 64, 4, 1) if padded <= 128 else Config(64, 32, 4, 1)
    if padded <= 64:
        return Config(128, 64, 4, 3)
    if padded == 128:
        return Config(128, 64, 8, 2) if shared_bytes < 160 << 10 else Config(128, 64, 8, 3)
    return Config(128, 32, 8, 2)


def _float32(padded: int, shared_bytes: int) -> Config:
    """Multiplied one by one, not by matrix units."""
    if padded <= 64:
        return Config(64, 32, 4, 2)
    if padded == 128:
        return Config(64, 32, 8, 2 if shared_bytes >= 99 << 10 else 1)
    return Config(32, 16, 8, 2 if shared_bytes >= 99 << 10 else 1)
