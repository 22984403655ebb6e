"""Attention in plain torch ops: the meaning of the op, in any dtype.

Scores are made for some queries at a time, so that long sequences fit in memory in float64, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.ops.flash_attention.desc import UNBOUNDED, window_bounds

if TYPE_CHECKING:
    from onepass.ops.flash_attention.op import Desc

_SCORES_AT_ONCE = 1 << 24


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arithmetic in float32, or in float64 when q is float64; rounded once at the end."""
    left, right = window_bounds(window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend(q, k, v, scale, left, 0 if causal else right, softcap, sinks)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of each sequence; zeros in rows of no sequence."""
    left, right = window_bounds(window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q)
    work = torch.promote_types(q.dtype, torch.float32)
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=work, device=q.device)
    for (q0, q1), (k0, k1) in _pairs(q, k, cu_seqlens_q, cu_seqlens_k):
        sequence = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
        result, sums = attend(*sequence, scale, left, 0 if causal else right, softcap, sinks)
        out[q0:q1], lse[:, q0:q1] = result[0], sums[0]
    return (out, lse) if return_lse else out


def _bounds(cu_seqlens: Tensor, tokens: int) -> list[tuple[int, int]]:
    """First and end of each sequence, cut to the `tokens` that there are."""
    found = []
    for bound, end in itertools.pairwise(cu_seqlens.tolist()):
        first = min(max(bound, 0), tokens)
        found.append((first, min(max(first, end), tokens)))
    return found


def _pairs(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[Any, Any]]:
    return zip(_bounds(cu_seqlens_q, q.shape[0]), _bounds(cu_seqlens_k, k.shape[0]), strict=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    left: int,
    right: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q [batch, seqlen_q, num_q_heads, head_dim] gives (out like q, lse [batch, num_q_heads, seqlen_q])."""
    work = torch.promote_types(q.dtype, torch.float32)
    batch, seqlen_q, num_q_heads, _ = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    group = num_q_heads // num_kv_heads
    out = q.new_empty(q.shape)
    lse = q.new_empty(batch, num_q_heads, seqlen_q, dtype=work)
    queries_at_once = max(1, _SCORES_AT_ONCE // max(1, num_q_heads * seqlen_k))
    step = min(max(1, seqlen_q), queries_at_once)
    sequences_at_once = max(1, queries_at_once // step)
    for i in range(0, batch, sequences_at_once):
        some = slice(i, i + sequences_at_once)
        # [batch, num_kv_heads, group, tokens, head_dim]
        queries = q[some].to(work).transpose(1, 2).unflatten(1, (num_kv_heads, group))
        keys, values = (t[some].to(work).transpose(1, 2).unsqueeze(2) for t in (k, v))
        for first in range(0, seqlen_q, step):
            rows = slice(first, first + step)
            scores = queries[..., rows, :] @ keys.transpose(-1, -2) * softmax_scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            visible = visible_keys(seqlen_q, seqlen_k, left, right, q.device, rows)
            scores = scores.masked_fill(~visible, -math.inf)
            # Without a sink the column's score counts nothing, and softmax always has a column.
            column = scores.new_full((num_kv_heads, group, 1, 1), -math.inf)
            if sinks is not None:
                column = sinks.to(work).view(num_kv_heads, group, 1, 1)
            scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
            lse[some, :, rows] = torch.logsumexp(scores, dim=-1).flatten(1, 2)
            # A row of -inf alone has no largest score to subtract.
            weights = torch.softmax(scores, dim=-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)
            result = weights[..., :seqlen_k] @ values
            out[some, rows] = result.flatten(1, 2).transpose(1, 2).to(q.dtype)
    return out, lse


def visible_keys(
    seqlen_q: int, seqlen_k: int, left: int, right: int, device: torch.device, rows: slice = slice(None)
) -> Tensor:
    """[queries, seqlen_k]: whether the query sees the key. The last query stands at the last key's position."""
    positions = torch.arange(seqlen_q, device=device)[rows, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=device)
    visible = torch.ones(positions.shape[0], seqlen_k, dtype=torch.bool, device=device)
    if left != UNBOUNDED:
        visible &= keys >= positions - left
    if right != UNBOUNDED:
        visible &= keys <= positions + right
    return visible


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        strides: object,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> None:
        def compute(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
            result, sums = attend(q, k, v, desc.softmax_scale, desc.left, desc.right, desc.softcap, sinks)
            out.copy_(result)
            if lse is not None:
                lse.copy_(sums)

        if cu_seqlens_q is None or cu_seqlens_k is None:
            compute(q, k, v, out, lse)
            return
        for (q0, q1), (k0, k1) in _pairs(q, k, cu_seqlens_q, cu_seqlens_k):
            sums = None if lse is None else lse[None, :, q0:q1]
            compute(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], out[None, q0:q1], sums)

    return run
