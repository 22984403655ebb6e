"""rms_norm_rope in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from onepass.ops.rope_reference import rms_norm, rotate

if TYPE_CHECKING:
    from onepass.ops.rope_call import Desc


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """The norm, not rounded, then the rotation, rounded once."""
    normed = rms_norm(x, weight, eps, weight_offset)
    return rotate(normed, cos_sin_cache, positions, interleaved).to(x.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, eps: float, weight_offset: float, *tensors: Tensor) -> None:
        x, _, _, weight, _, cache, positions, out, *_ = tensors
        options = {"eps": eps, "weight_offset": weight_offset}
        out.copy_(rms_norm_rope(x, weight, cache, positions, **options, interleaved=desc.interleaved))

    return run
