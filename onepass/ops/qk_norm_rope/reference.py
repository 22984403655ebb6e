"""qk_norm_rope in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.ops.rope_reference import rms_norm, rotate

if TYPE_CHECKING:
    from onepass.ops.rope_call import Desc


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k normed and turned, each rounded once; v as it is."""
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = (
        rotate(rms_norm(x, weight, eps, weight_offset), cos_sin_cache, positions, interleaved).to(qkv.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, v


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    sizes: dict[str, Any] = {
        "num_q_heads": desc.num_q_heads,
        "num_kv_heads": desc.num_k_heads,
        "head_dim": desc.head_dim,
    }

    def run(strides: object, eps: float, weight_offset: float, *tensors: Any) -> None:
        q, k, v, q_weight, k_weight, cache, positions, *outputs = tensors
        qkv = torch.cat([q, k, k if v is None else v], dim=1).flatten(1)
        options = {**sizes, "eps": eps, "weight_offset": weight_offset, "interleaved": desc.interleaved}
        for out, result in zip(
            outputs, qk_norm_rope(qkv, q_weight, k_weight, cache, positions, **options), strict=True
        ):
            if out is not None:
                out.copy_(result)

    return run
