"""Attention over a paged cache in plain torch ops, a sequence at a time: the meaning of the op, in any dtype.

Scaled dot-product attention is from Vaswani et al., "Attention Is All You Need" (2017); the paged cache from Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023); sinks as in Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks" (2023), with a learnt logit instead of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.ops.kv_cache import nhd_shape

if TYPE_CHECKING:
    from onepass.ops.paged_attention.op import Desc, Numbers, Strides

_NAN = float("nan")


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Everything after the load runs in float32, or in float64 when q is float64, and is rounded once at the end."""
    work = torch.promote_types(q.dtype, torch.float32)
    num_pages, page_size, num_kv_heads, head_dim = nhd_shape(key_cache, kv_layout)
    batch, q_len, num_q_heads, _ = q.shape
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape, dtype=work, device=q.device)
    lse = torch.full((batch, num_q_heads, q_len), -math.inf, dtype=work, device=q.device)
    for b, length in enumerate(cache_seqlens.tolist()):
        if not 0 <= length <= block_table.shape[1] * page_size:
            out[b], lse[b] = _NAN, _NAN
            continue
        # Keys that no query sees are not read: their pages may be gone.
        low = 0 if window_size is None else max(length - q_len + 1 - window_size, 0)
        keys = torch.arange(low, length, device=q.device)
        pages = block_table[b, keys // page_size].long()
        known = (pages >= 0) & (pages < num_pages)
        k, v = (
            _gather(cache, pages * known, keys % page_size, kv_layout).to(work) * factor
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        k[~known] = _NAN
        group = num_q_heads // num_kv_heads
        rows = q[b].to(work).view(q_len, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", rows, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            last = torch.arange(length - q_len, length, device=q.device)[:, None]
            hidden = keys > last
            if window_size is not None:
                hidden |= keys <= last - window_size
            scores = scores.masked_fill(hidden, -math.inf)
        scores = scores.reshape(num_q_heads, q_len, len(keys))
        if sinks is not None:
            sink = sinks.to(work)[:, None, None].expand(num_q_heads, q_len, 1)
            scores = torch.cat((scores, sink), dim=-1)
        if scores.shape[-1] == 0:
            continue
        lse[b] = torch.logsumexp(scores, dim=-1)
        # No keys at all: every weight is exp(-inf) = 0.
        weights = torch.exp(scores - lse[b].nan_to_num(neginf=0.0, posinf=math.inf, nan=_NAN)[..., None])
        weights = weights[..., : len(keys)].reshape(num_kv_heads, group, q_len, len(keys))
        out[b] = torch.einsum("hgqk,khd->qhgd", weights, v).reshape(q_len, num_q_heads, head_dim)
    result = out.to(q.dtype)
    return (result, lse.to(torch.promote_types(torch.float32, work))) if return_lse else result


def _gather(cache: Tensor, pages: Tensor, slots: Tensor, kv_layout: str) -> Tensor:
    """[keys, num_kv_heads, head_dim]."""
    if kv_layout == "NHD":
        return cache[pages, slots]
    return cache.transpose(1, 2)[pages, slots]


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        numbers: Numbers,
        strides: Strides,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        sinks: Tensor | None,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        shape = (desc.num_pages, desc.page_size, desc.num_kv_heads, desc.head_dim)
        result, new_lse = paged_attention(
            q,
            key_cache.as_strided(shape, (*strides[3:6], 1)),
            value_cache.as_strided(shape, (*strides[6:9], 1)),
            block_table,
            cache_seqlens,
            causal=desc.causal,
            softmax_scale=numbers.softmax_scale,
            window_size=numbers.window if desc.window else None,
            softcap=numbers.softcap if desc.softcap else None,
            sinks=sinks,
            v_scale=numbers.v_scale,
            return_lse=True,
        )
        out.copy_(result)
        if lse is not None:
            lse.copy_(new_lse)

    return run
