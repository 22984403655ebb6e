"""merge_attention_states in plain torch ops: the meaning of the op, in any dtype.

The rule is that of online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.merge_attention_states.op import Desc, Strides


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Arithmetic in float32, or in float64 when the states are float64; rounded once at the end."""
    work = torch.promote_types(out_a.dtype, torch.float32)
    a, b = lse_a.to(work), lse_b.to(work)
    top = torch.where(a.isnan() | b.isnan(), torch.nan, torch.maximum(a, b))
    empty = top == -torch.inf
    safe = top.masked_fill(empty, 0)
    weight_a, weight_b = torch.exp(a - safe), torch.exp(b - safe)
    total = weight_a + weight_b
    lse = safe + torch.log(total)
    parts = []
    for out, weight, alone in ((out_a, weight_a, a), (out_b, weight_b, b)):
        share = (weight / total).masked_fill(empty, 0).transpose(1, 2)[..., None]
        absent = (alone == -torch.inf).transpose(1, 2)[..., None]
        parts.append(out.to(work).masked_fill(absent, 0) * share)
    return (parts[0] + parts[1]).to(out_a.dtype), lse.to(lse_a.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        strides: Strides, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        new_out, new_lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
        out.copy_(new_out)
        lse.copy_(new_lse)

    return run
