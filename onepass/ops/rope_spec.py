"""What the specs of ops with RoPE share: random tables and positions, and what PyTorch users write without the ops."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 500_000.0
"""Of Llama 3's angles."""

MIN_POSITIONS = 16
"""A table has as many positions as there are tokens, so that benchmarks rotate over memory that calls read; at least
these."""


def cos_sin_table(max_position: int, rotary_dim: int, device: torch.device) -> Tensor:
    """[max_position, rotary_dim]: cosines, then sines, of position * BASE^(-2i / rotary_dim)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * BASE**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def table_and_positions(
    num_tokens: int, rotary_dim: int, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    """The arguments cos_sin_cache and positions; every token has a position of its own, in random order."""
    max_position = max(num_tokens, MIN_POSITIONS)
    order = torch.randperm(max_position, device=device, generator=generator)
    return {
        "cos_sin_cache": cos_sin_table(max_position, rotary_dim, device),
        "positions": order[:num_tokens].int(),
    }


def table_bytes(cos_sin_cache: Tensor, positions: Tensor) -> int:
    """What must be read of the table, each row once, and of the positions."""
    rows = min(positions.numel(), cos_sin_cache.shape[0])
    return rows * cos_sin_cache.shape[1] * 4 + positions.numel() * positions.element_size()


def gathered(cos_sin_cache: Tensor, positions: Tensor, dtype: torch.dtype, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos and sin of each element, [num_tokens, 1, rotary_dim], in the model's dtype, as transformers makes them."""
    rows = cos_sin_cache.index_select(0, positions).to(dtype)
    cos, sin = (
        half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
        for half in rows.unsqueeze(1).chunk(2, dim=-1)
    )
    return cos, sin


def unfused_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x * cos + rotate_half(x) * sin, in x's dtype, as transformers has it."""
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotary.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotary = rotary * cos + turned * sin
    return rotary if rest.shape[-1] == 0 else torch.cat((rotary, rest), dim=-1)


def unfused_rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """As transformers has it: in float32, rounded before the weight (Qwen3) or with it (Gemma 3: weight_offset 1)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        return weight * wide.to(x.dtype)
    return (wide * (weight_offset + weight.float())).to(x.dtype)
