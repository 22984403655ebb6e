"""qk_norm_rope in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
    def run(strides: object, eps: float, weight_offset: float, *tensors: Tensor | None) -> None:
        q, k, v, q_weight, k_weight, cache, positions, q_out, k_out, v_out = tensors
        assert cache is not None and positions is not None
        for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
            assert x is not None and weight is not None and out is not None
            turned = rotate(rms_norm(x, weight, eps, weight_offset), cache, positions, desc.interleaved)
            out.copy_(turned)
        if v_out is not None and v is not None:
            v_out.copy_(v)

    return run
