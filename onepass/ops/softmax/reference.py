"""Softmax with a temperature in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.softmax.op import Desc


def softmax(logits: Tensor, *, temperature: float | Tensor | None = None) -> Tensor:
    """softmax(logits / temperature), in float32 and rounded once, or all in float64 when logits are float64.

    Temperature 0 is the limit with one difference: of several largest logits the first takes all. Rows that softmax
    itself makes NaN (a NaN, +inf, nothing but -inf) are NaN at every temperature, and so is a row whose temperature is
    negative or NaN.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is None:
        return torch.softmax(x, -1).to(logits.dtype)
    t = torch.as_tensor(temperature, device=x.device).to(x.dtype).unsqueeze(-1)
    largest = x.amax(-1, keepdim=True)
    # Subtracting first keeps a small temperature from making infinities of large logits.
    warm = torch.softmax((x - largest) / torch.where(t > 0, t, torch.nan), -1)
    columns = torch.arange(x.shape[-1], device=x.device)
    first = torch.where(x == largest, columns, x.shape[-1]).amin(-1, keepdim=True)
    cold = (columns == first) + 0.0 * torch.softmax(x, -1)
    return torch.where(t == 0, cold, warm).to(logits.dtype)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(strides: object, temperature: float, logits: Tensor, temperatures: Tensor | None, out: Tensor) -> None:
        out.copy_(softmax(logits, temperature=temperature if temperatures is None else temperatures))

    return run
