"""RoPE and the RMSNorm before it in plain torch ops: what the ops with `rope` in their name mean, in any dtype.

RoPE is from Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), RMSNorm from Zhang and
Sennrich, "Root Mean Square Layer Normalization" (2019); normalised queries and keys are as in Qwen3 and Gemma 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first rotary_dim elements of each head of x [num_tokens, heads, head_dim], turned by its token's angles.

    The result is not rounded: it is float32, or float64 where x is. A token whose position is outside the table is NaN.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    max_position, rotary_dim = cos_sin_cache.shape
    valid = (positions >= 0) & (positions < max_position)
    if max_position:
        rows = cos_sin_cache[positions.long().masked_fill(~valid, 0)].to(work)
    else:
        rows = cos_sin_cache.new_zeros((positions.shape[0], rotary_dim), dtype=work)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    rotary, rest = x.to(work).split((rotary_dim, x.shape[-1] - rotary_dim), dim=-1)
    if interleaved:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotary = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((rotary, rest), dim=-1).masked_fill(~valid[:, None, None], float("nan"))


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, not rounded."""
    work = torch.promote_types(x.dtype, torch.float32)
    x = x.to(work)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (weight.to(work) + weight_offset)
