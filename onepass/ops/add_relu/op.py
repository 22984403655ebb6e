"""add_relu: relu(x + y) in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.ops.checks import check_like, check_no_grad, check_tensor
from onepass.ops.registration import register
from onepass.ops.rows import aligned_16, as_rows, check_output, copy_notes, row_stride


class Desc(NamedTuple):
    """What an add_relu kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    num_rows: int
    """1 when all tensors are contiguous: they are then one long row."""
    num_cols: int
    aligned: bool
    """Every pointer and every row stride is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class RowStrides(NamedTuple):
    """Distance between rows in elements."""

    x: int
    y: int
    out: int


def add_relu(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """relu(x + y) in one kernel; NaN goes through, as in torch.

    Args:
        x: any shape, float32, bfloat16 or float16, any row strides; other layouts are copied first.
        y: shape, dtype and device of x; nothing is broadcast.
        out: where the result is written: shape and dtype of x; may be exactly x or y.

    Returns:
        relu(x + y), shape and dtype of x, the sum rounded once.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    _check(x, y, out)
    if out is None:
        return _add_relu(x, y)
    _add_relu_out(x, y, out)
    return out


def describe(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(x, y, out)
    operands = {"x": x, "y": y, "out": out}
    copied = tuple(name for name, t in operands.items() if t is not None and row_stride(t) is None)
    strided = [t for name, t in operands.items() if t is not None and name not in copied]
    return _desc(x, strided, copied)


def _check(x: Tensor, y: Tensor, out: Tensor | None) -> None:
    check_tensor("add_relu", "x", x)
    check_like("add_relu", "y", y, x)
    if out is not None:
        check_like("add_relu", "out", out, x)
    if torch.is_grad_enabled():
        check_no_grad("add_relu", "torch.relu(x + y)", x=x, y=y)


def _desc(x: Tensor, strided: list[Tensor], copied: tuple[str, ...] = ()) -> Desc:
    flat = all(t.is_contiguous() for t in strided)
    num_cols = x.numel() if flat else x.shape[-1]
    strides = () if flat else tuple(row_stride(t) or 0 for t in strided)
    return Desc(
        x.device,
        x.dtype,
        1 if flat else x.numel() // num_cols,
        num_cols,
        aligned_16(x.element_size(), strides, *strided),
        copied,
    )


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, y, out)
    return out


def _kernel_out(x: Tensor, y: Tensor, out: Tensor) -> None:
    check_output("add_relu", "out", out, x=x, y=y)
    target = out if row_stride(out) is not None else torch.empty_like(out, memory_format=torch.contiguous_format)
    _launch(x, y, target)
    if target is not out:
        out.copy_(target)


def _launch(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Run the chosen backend on checked arguments; `out` has a single row stride."""
    if x.numel() == 0:
        return
    x, stride_x = as_rows(x)
    y, stride_y = as_rows(y)
    desc = _desc(x, [x, y, out])
    strides = RowStrides(stride_x, stride_y, row_stride(out))  # type: ignore[arg-type]
    dispatch.select("add_relu", desc).run(desc, x, y, out, strides)


_add_relu = register(
    "add_relu(Tensor x, Tensor y) -> Tensor",
    _kernel,
    lambda x, y: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_add_relu_out = register(
    "add_relu_out(Tensor x, Tensor y, Tensor(a!) out) -> ()",
    _kernel_out,
    lambda x, y, out: None,
)
