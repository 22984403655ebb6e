"""How a row of logits is cut into segments, one program each. It depends on the vocabulary and the dtype alone.

That is what makes a row's bits independent of its batch, and what keeps a new batch size from compiling anything.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PARTS = 16
"""Of a row; longer rows have longer parts."""

MAX_CHUNKS = 8
"""Accesses of 16 bytes that a thread has in flight: 32 KB a program, and three programs on a multiprocessor."""


ROWS = 128
"""Rows that a program of the second kernel puts together."""


class Config(NamedTuple):
    """One shape of the Triton kernel."""

    num_warps: int
    chunk: int
    """Columns that all threads of a program load at once, 16 bytes each."""
    chunks: int
    """Chunks that stay in registers together."""
    steps: int
    """How often a program loads `chunks` chunks."""
    parts: int
    """Programs a row."""

    @property
    def segment(self) -> int:
        """Columns a part has; the last one may have fewer."""
        return self.chunk * self.chunks * self.steps


def heuristic(vocab_size: int, element_size: int) -> Config:
    """Parts of equal length, 32 KB or less each as long as there are at most MAX_PARTS of them."""
    num_warps = 8
    while num_warps > 1 and vocab_size <= _chunk(num_warps, element_size) * MAX_CHUNKS // 4:
        num_warps //= 2
    chunk = _chunk(num_warps, element_size)
    parts = max(1, min(MAX_PARTS, -(-vocab_size // (chunk * MAX_CHUNKS))))
    part = max(1, -(-vocab_size // parts))
    steps = -(-part // (chunk * MAX_CHUNKS))
    return Config(num_warps, chunk, -(-part // (chunk * steps)), steps, parts)


def _chunk(num_warps: int, element_size: int) -> int:
    return num_warps * 32 * 16 // element_size


def workspace_size(num_rows: int, vocab_size: int, element_size: int, smooth: bool) -> int:
    """Float32 numbers that a call keeps: two for each part of each row, with label smoothing three, and two for each
    ROWS rows."""
    parts = heuristic(vocab_size, element_size).parts
    return (3 if smooth else 2) * parts * num_rows + 2 * -(-num_rows // ROWS)
