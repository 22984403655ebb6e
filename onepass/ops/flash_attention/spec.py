"""What benchmarks and tests need to know of flash_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.ops.flash_attention.desc import UNBOUNDED, window_bounds
from onepass.ops.flash_attention.op import flash_attention
from onepass.ops.flash_attention.reference import flash_attention as reference
from onepass.ops.flash_attention.reference import visible_keys
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

# batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim, causal (0 or 1)
PREFILL = (
    (1, 1024, 1024, 32, 8, 128, 1),
    (1, 4096, 4096, 32, 8, 128, 1),
    (4, 4096, 4096, 32, 8, 128, 1),
    (1, 16384, 16384, 32, 8, 128, 1),
    (8, 2048, 2048, 32, 8, 64, 1),
    (4, 4096, 4096, 32, 32, 128, 0),
)
ON_CPU = (
    (1, 1, 2048, 32, 8, 128, 1),
    (1, 512, 512, 9, 3, 64, 1),
)
"""A decode step of Llama-3-8B, and a prompt for SmolLM2-135M."""


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random q, k and v. The shape of q alone means as many keys and heads of them, and causal."""
    if len(shape) == 4:
        batch, seqlen, heads, head_dim = shape
        shape = (batch, seqlen, seqlen, heads, heads, head_dim, 1)
    batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim, causal = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)

    return {
        "q": normal(batch, seqlen_q, num_q_heads, head_dim),
        "k": normal(batch, seqlen_k, num_kv_heads, head_dim),
        "v": normal(batch, seqlen_k, num_kv_heads, head_dim),
        "causal": bool(causal),
    }


def make_packed_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """One sequence with this shape of q, [tokens, heads, head_dim], and as many keys, for `flash_attention_varlen`."""
    tokens = shape[0]
    inputs = make_inputs((1, *shape), dtype, device, seed)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return {
        **{name: inputs[name][0] for name in ("q", "k", "v")},
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": tokens,
        "max_seqlen_k": tokens,
    }


def unfused(
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
    """Three steps over the whole matrix of scores, with k and v repeated for the heads of q: attention as the "eager"
    models of transformers have it (softmax in float32, its weights rounded to q's dtype)."""
    left, right = window_bounds(window_size)
    right = 0 if causal else right
    group = q.shape[2] // k.shape[2]
    queries, keys, values = q.transpose(1, 2), *(t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    scores = queries @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if (left, right) != (UNBOUNDED, UNBOUNDED):
        visible = visible_keys(q.shape[1], k.shape[1], left, right, q.device)
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    out = (weights[..., : k.shape[1]] @ values).transpose(1, 2).contiguous()
    return (out, torch.logsumexp(scores.float(), dim=-1)) if return_lse else out


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """How many pairs of a query and a key meet in one head of one sequence."""
    total = 0
    for i in range(seqlen_q):
        position = i + seqlen_k - seqlen_q
        first = 0 if left == UNBOUNDED else max(0, position - left)
        last = seqlen_k - 1 if right == UNBOUNDED else min(seqlen_k - 1, position + right)
        total += max(0, last - first + 1)
    return total


def _flops(inputs: Inputs) -> int:
    """Two products of head_dim multiplications and additions for each pair that meets."""
    q, k = inputs["q"], inputs["k"]
    left, right = window_bounds(inputs.get("window_size"))
    pairs = visible_pairs(q.shape[1], k.shape[1], left, 0 if inputs.get("causal") else right)
    return 4 * q.shape[0] * q.shape[2] * q.shape[3] * pairs


def _bytes(inputs: Inputs) -> int:
    return 2 * tensor_bytes(inputs["q"]) + tensor_bytes(inputs["k"], inputs["v"])


def _unfused_bytes(inputs: Inputs) -> int:
    """Repeated k and v written and read; scores written, scaled, masked, and read by the softmax; its weights, made in
    float32 and rounded, written and read."""
    q, k = inputs["q"], inputs["k"]
    group = q.shape[2] // k.shape[2]
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    passes = 6 if inputs.get("causal") or inputs.get("window_size") is not None else 4
    repeated = (1 + 2 * group) * tensor_bytes(k, inputs["v"]) if group > 1 else tensor_bytes(k, inputs["v"])
    wide = 0 if q.element_size() == 4 else 8
    return 4 * tensor_bytes(q) + repeated + scores * (passes * q.element_size() + wide)


def _allocate_out(inputs: dict[str, Any]) -> Inputs:
    return {"out": torch.empty_like(inputs["q"], memory_format=torch.contiguous_format)}


SPEC = OpSpec(
    op="flash_attention",
    shapes=PREFILL,
    cpu_shapes=ON_CPU,
    make_inputs=make_inputs,
    fused=flash_attention,
    unfused=unfused,
    reference=reference,
    allocate_out=_allocate_out,
    bytes_moved=_bytes,
    unfused_bytes=_unfused_bytes,
    unfused_launches=22,  # with heads that share keys and a causal mask
    flops=_flops,
    row_inputs=("q", "k", "v"),
    form_inputs={"flash_attention_varlen": make_packed_inputs},
)
