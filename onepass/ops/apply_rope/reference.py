"""apply_rope in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from onepass.ops.rope_reference import rotate

if TYPE_CHECKING:
    from onepass.ops.rope_call import Desc


def apply_rope(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k turned, each rounded once."""
    q_out, k_out = (rotate(x, cos_sin_cache, positions, interleaved).to(x.dtype) for x in (q, k))
    return q_out, k_out


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, eps: float, weight_offset: float, *tensors: Tensor) -> None:
        q, k, _, _, _, cache, positions, q_out, k_out, _ = tensors
        results = apply_rope(q, k, cache, positions, interleaved=desc.interleaved)
        for out, result in zip((q_out, k_out), results, strict=True):
            out.copy_(result)

    return run
