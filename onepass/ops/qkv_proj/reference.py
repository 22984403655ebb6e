"""qkv_proj in plain torch ops: the meaning of the op, in any dtype. Run in float64 it is the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from onepass.ops.rope_reference import rms_norm, rotate

if TYPE_CHECKING:
    from onepass.ops.qkv_proj.op import Call, Desc


def append(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Write values [num_tokens, heads, head_dim] into a paged cache; a slot outside it is skipped."""
    num_pages, page_size = cache.shape[:2]
    tokens = torch.nonzero((slot_mapping >= 0) & (slot_mapping < num_pages * page_size)).flatten()
    slots = slot_mapping[tokens]
    cache[slots // page_size, slots % page_size] = values[tokens]


def qkv_proj(
    x: Tensor,
    w_qkv: Tensor,
    bias: Tensor | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float = 1e-6,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of every token, rounded to x's dtype after each step, as the unfused models do."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_weight_offset).to(x.dtype)
    qkv = F.linear(x, w_qkv, None if bias is None else bias.to(x.dtype))
    heads = qkv.unflatten(-1, (num_q_heads + 2 * num_kv_heads, head_dim))
    q, k, v = (part.contiguous() for part in heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1))
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, qk_norm_eps, norm_weight_offset).to(x.dtype)
        k = rms_norm(k, k_norm_weight, qk_norm_eps, norm_weight_offset).to(x.dtype)
    if cos_sin_cache is not None and positions is not None:
        q = rotate(q, cos_sin_cache, positions, interleaved).to(x.dtype)
        k = rotate(k, cos_sin_cache, positions, interleaved).to(x.dtype)
    if key_cache is not None and value_cache is not None and slot_mapping is not None:
        append(key_cache, k, slot_mapping)
        append(value_cache, v, slot_mapping)
    return q, k, v


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        call: Call,
        x: Tensor,
        w_qkv: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        cos_sin_cache: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        positions: Tensor | None,
        slot_mapping: Tensor | None,
        *outputs: Tensor,
    ) -> None:
        results = qkv_proj(
            x,
            w_qkv,
            bias,
            num_q_heads=desc.num_q_heads,
            num_kv_heads=desc.num_kv_heads,
            head_dim=desc.head_dim,
            norm_weight=norm_weight,
            norm_eps=call.norm_eps,
            norm_weight_offset=call.norm_weight_offset,
            q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight,
            qk_norm_eps=call.qk_norm_eps,
            cos_sin_cache=cos_sin_cache,
            positions=positions,
            interleaved=desc.interleaved,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slot_mapping,
        )
        for out, result in zip(outputs, results, strict=True):
            out.copy_(result)

    return run
