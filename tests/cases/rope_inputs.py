"""Inputs that the tables of the ops with RoPE share: heads, tables of angles, positions, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, normal
from onepass.ops.rope_spec import cos_sin_table

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
MAX_POSITION = 600


class Model(NamedTuple):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


LLAMA = Model(32, 8, 128, 128)
SMOL = Model(9, 3, 64, 64)

MODELS = {
    "R8-smollm2": SMOL,
    "llama-3-8b": LLAMA,
    "R3-128-64": Model(4, 2, 128, 64),
    "R3-80": Model(4, 2, 80, 80),
    "R3-80-32": Model(4, 2, 80, 32),
    "R3-96": Model(6, 2, 96, 96),
    "256": Model(4, 1, 256, 256),
    "256-64": Model(2, 1, 256, 64),
    "R4-one-kv-head": Model(8, 1, 64, 64),
    "one-head": Model(1, 1, 64, 64),
    "72": Model(2, 1, 72, 72),
    "7-4": Model(3, 2, 7, 4),
    "17-2": Model(2, 1, 17, 2),
    "2": Model(3, 1, 2, 2),
    "20-heads": Model(20, 20, 16, 16),
}


def heads(device: torch.device, *shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return normal(device, *shape, dtype=dtype, seed=seed)


def table(device: torch.device, rotary_dim: int, max_position: int = MAX_POSITION) -> Tensor:
    """Made on the CPU, so that every device gets the same."""
    return cos_sin_table(max_position, rotary_dim, torch.device("cpu")).to(device)


def positions(device: torch.device, num_tokens: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """In no order, from both ends of the table."""
    values = (torch.arange(num_tokens) * 257 + MAX_POSITION - 1) % MAX_POSITION
    return values.to(device=device, dtype=dtype)


BAD: dict[str, tuple[Sequence[int], torch.dtype]] = {
    "R2-past-the-table": ([3, MAX_POSITION, 5, MAX_POSITION - 1], torch.int32),
    "R2-negative": ([-1, 0, -(2**31), 7], torch.int32),
    "R2-int64": ([2**40, 1, 2**32 + 1, -1, -(2**63), 2**63 - 1], torch.int64),
}
"""Positions outside the table, among others."""


def weight(device: torch.device, head_dim: int, dtype: torch.dtype = BF16, seed: int = 101) -> Tensor:
    return normal(device, head_dim, dtype=dtype, base=1.0, scale=0.2, seed=seed)


def special(x: Tensor) -> None:
    """NaN, infinities and zeros in some heads of x [num_tokens, heads, head_dim]."""
    x[0, 0, 0] = float("nan")
    x[1, -1, -1] = float("inf")
    x[2, 0, 7] = -float("inf")
    x[3, 1, 3], x[3, 1, 40] = float("inf"), -float("inf")
    x[4, 0] = 0.0
    x[5, 1] = -0.0
    x[6] = float("nan")


def layouts(*shape: int, dtype: torch.dtype = BF16) -> Iterator[tuple[str, Callable[[torch.device], Tensor]]]:
    """Named ways in which [num_tokens, heads, head_dim] may lie in memory."""
    tokens, count, dim = shape
    yield "N4-heads-first", lambda d: heads(d, count, tokens, dim, dtype=dtype).transpose(0, 1)
    yield "N4-slice", lambda d: heads(d, tokens, count + 3, dim + 16, dtype=dtype)[:, 1 : count + 1, 8 : dim + 8]
    yield "N4-odd-stride", lambda d: heads(d, tokens, count, dim + 1, dtype=dtype)[..., 1:]
    yield "N4-every-other-column", lambda d: heads(d, tokens, count, 2 * dim, dtype=dtype)[..., ::2]
    yield "N4-transposed", lambda d: heads(d, tokens, dim, count, dtype=dtype).transpose(1, 2)
    yield "N4-expanded", lambda d: heads(d, 1, 1, dim, dtype=dtype).expand(tokens, count, dim)
    yield "N4-one-token-of-many", lambda d: heads(d, tokens, count, dim, dtype=dtype)[1:2]
    yield "N7-offset-1", lambda d: heads(d, tokens * count * dim + 1, dtype=dtype)[1:].view(tokens, count, dim)
