"""logsumexp on the CPU: a row is read from memory once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.launch import cpu
from onepass.launch.cpu_memory import row_start, store_first, take
from onepass.launch.cpu_vector import splat
from onepass.ops.softmax_cpu import statistics

if TYPE_CHECKING:
    from onepass.ops.logsumexp.op import Desc, RowStrides


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cpu":
        return (f"tensors are on '{desc.device.type}', not on 'cpu'",)
    return cpu.missing_features(desc.dtype)


@cpu.kernel
def logsumexp_kernel(
    x: Any, out: Any, stride_x: int, stride_out: int, n: int, num_rows: int, chunk: int, counter: int
) -> None:
    first_row = take(counter, chunk)
    while first_row < num_rows:
        for row in range(first_row, min(first_row + chunk, num_rows)):
            largest, total = statistics(row_start(x, row, stride_x), out, n, 1.0)
            store_first(row_start(out, row, stride_out), 0, splat(largest + math.log(total)), 1)
        first_row = take(counter, chunk)


@lru_cache(maxsize=8)
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    return logsumexp_kernel.compiled(cpu.pointer(dtype), cpu.pointer(torch.float32), *(int,) * 6)


def prepare(desc: Desc) -> Callable[..., None]:
    """The function that runs calls like `desc`, with their strides and tensors."""
    return partial(_launch, _compiled(desc.dtype), desc.num_rows, desc.num_cols)


def _launch(kernel: Callable[..., None], num_rows: int, n: int, strides: RowStrides, x: Tensor, out: Tensor) -> None:
    cpu.run_rows(kernel, (x.data_ptr(), out.data_ptr(), *strides, n), num_rows, n)
