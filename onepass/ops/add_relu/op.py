"""add_relu: relu(x + y) in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from onepass import dispatch
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_like,
    check_tensor,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import (
    aligned_16,
    as_out_rows,
    as_rows,
    check_output,
    contiguous_like,
    copy_notes,
    row_stride,
    strides_aligned_16,
)


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
    if out is None:
        return _add_relu(x, y)
    _add_relu_out(x, y, out)
    return out


def describe(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    operands = {"x": x, "y": y, "out": out} if out is not None else {"x": x, "y": y}
    _check(*operands.values())
    copied = tuple(name for name, t in operands.items() if row_stride(t) is None)
    in_place = [t for name, t in operands.items() if name not in copied]
    return _desc(x, in_place, aligned_16(*in_place), bool(copied) or out is None, copied)


def _check(x: Any, y: Any, out: Any = None) -> None:
    """Everything but overlaps of memory."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and isinstance(out, OPTIONAL_TENSOR)):
        raise_not_tensor("add_relu", ("x", "y"), x=x, y=y, out=out)
    if torch.is_grad_enabled() and any_requires_grad(x, y, out):
        raise_requires_grad("add_relu", "torch.relu(x + y)", x=x, y=y, out=out)
    check_tensor("add_relu", "x", x)
    check_like("add_relu", "y", y, x)
    if out is not None:
        check_like("add_relu", "out", out, x)


def _desc(x: Tensor, operands: Sequence[Tensor], aligned: bool, any_fresh: bool, copied: tuple[str, ...] = ()) -> Desc:
    """`operands` are used where they lie; `any_fresh`: others are fresh, contiguous memory."""
    flat = all(t.is_contiguous() for t in operands)
    num_cols = x.numel() if flat else x.shape[-1]
    if not flat:
        strides = [row_stride(t) or 0 for t in operands] + [num_cols] * any_fresh
        aligned = aligned and strides_aligned_16(x.element_size(), strides)
    return Desc(x.device, x.dtype, 1 if flat else x.numel() // num_cols, num_cols, aligned, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    _check(*tensors)
    x, _, *outputs = operands = cast(tuple[Tensor, ...], tensors)
    if x.numel() == 0:
        return lambda *args: None
    strides = [row_stride(t) for t in operands]
    if None in strides:
        return _run_on_copies
    desc = _desc(x, operands, aligned, not outputs)
    fresh = () if outputs else (x.shape[-1] if x.ndim else 1,)
    return partial(dispatch.prepare("add_relu", desc), RowStrides(*strides, *fresh))  # type: ignore[arg-type]


_plans = Plans(_make_plan)


def _run_on_copies(x: Tensor, y: Tensor, out: Tensor) -> None:
    """The slower path of rows.py."""
    rows = as_out_rows(out)
    x, y = as_rows(x), as_rows(y)
    _plans.find((), (x, y, rows))(x, y, rows)
    if rows is not out:
        out.copy_(rows)


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    plan = _plans.find((), (x, y))
    out = contiguous_like(x)
    plan(x, y, out)
    return out


def _kernel_out(x: Tensor, y: Tensor, out: Tensor) -> None:
    plan = _plans.find((), (x, y, out))
    check_output("add_relu", "out", out, x=x, y=y)
    plan(x, y, out)


def _fake(x: Tensor, y: Tensor) -> Tensor:
    _check(x, y)
    return contiguous_like(x)


_add_relu = register("add_relu(Tensor x, Tensor y) -> Tensor", _kernel, _fake, _check)
_add_relu_out = register("add_relu_out(Tensor x, Tensor y, Tensor(a!) out) -> ()", _kernel_out, _check, _check)
