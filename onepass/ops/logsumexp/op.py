"""logsumexp: log(sum(exp(x))) of the last dimension, in one pass over x."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_tensor,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import aligned_16, as_rows, check_output, copy_notes, row_stride, strides_aligned_16


class Desc(NamedTuple):
    """What a logsumexp kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    num_rows: int
    num_cols: int
    aligned: bool
    """The pointer and the row stride of x are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class RowStrides(NamedTuple):
    """Distance between rows in elements; in `out`, between results."""

    x: int
    out: int


def logsumexp(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(sum(exp(x))) over the last dimension, in one read of x (one kernel; two for rows of more than 16384).

    Arithmetic is in float32. Special values are as torch's: -inf where all is -inf (or the row is empty), +inf with a
    +inf, NaN with a NaN. A row's bits depend on N, the dtype, the alignment of memory and the backend, never on the
    other rows. On a GPU, rows of more than 16384 elements use a workspace of 8 bytes a chunk of 8 KB, from PyTorch's
    allocator.

    Args:
        x: [..., N], float32, bfloat16 or float16, any row strides; other layouts are copied first.
        out: [...], float32, where the result is written.

    Returns:
        [...], float32.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if out is None:
        return _logsumexp(x)
    _logsumexp_out(x, out)
    return out


def describe(x: Tensor, *, out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(x, out)
    copied: tuple[str, ...] = ("x",) if row_stride(x) is None else ()
    aligned = bool(copied) or _aligned(x, aligned_16(x))
    if out is not None and _result_stride(out) is None:
        copied += ("out",)
    return _desc(x, aligned, copied)


def _check(x: Any, out: Any = None) -> None:
    """Everything but overlaps of memory."""
    op = "logsumexp"
    if not (isinstance(x, Tensor) and isinstance(out, OPTIONAL_TENSOR)):
        raise_not_tensor(op, ("x",), x=x, out=out)
    if torch.is_grad_enabled() and any_requires_grad(x, out):
        raise_requires_grad(op, "torch.logsumexp(x, -1)", x=x, out=out)
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    if out is not None:
        if out.dtype != torch.float32:
            raise ArgumentTypeError(op, "out", "float32", out.dtype)
        if out.shape != x.shape[:-1]:
            expected = f"shape {list(x.shape[:-1])}, one for each row of x"
            raise ArgumentValueError(op, "out", expected, list(out.shape))
        if out.device != x.device:
            raise ArgumentValueError(op, "out", f"the device of x, {x.device}", out.device)


def _aligned(x: Tensor, pointer_aligned: bool) -> bool:
    return pointer_aligned and strides_aligned_16(x.element_size(), (row_stride(x) or 0,))


def _desc(x: Tensor, aligned: bool, copied: tuple[str, ...] = ()) -> Desc:
    n = x.shape[-1]
    return Desc(x.device, x.dtype, math.prod(x.shape[:-1]), n, aligned, copied)


def _result_stride(out: Tensor) -> int | None:
    return row_stride(out.unsqueeze(-1))


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    _check(*tensors)
    x, *outputs = tensors
    assert x is not None
    if x.numel() == 0:
        return _fill_empty
    strides = [row_stride(x), *(_result_stride(out) for out in outputs if out is not None)]
    if None in strides:
        return _run_on_copies
    desc = _desc(x, _aligned(x, aligned))
    fresh = () if outputs else (1,)
    return partial(dispatch.prepare("logsumexp", desc), RowStrides(*strides, *fresh))  # type: ignore[arg-type]


_plans = Plans(_make_plan)


def _fill_empty(x: Tensor, out: Tensor) -> None:
    """The sum of nothing is 0."""
    if out.numel():
        out.fill_(-math.inf)


def _run_on_copies(x: Tensor, out: Tensor) -> None:
    """The slower path of rows.py."""
    results = out if _result_stride(out) is not None else _fresh(x)
    x = as_rows(x)
    _plans.find((), (x,), (results,))(x, results)
    if results is not out:
        out.copy_(results)


def _fresh(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _kernel(x: Tensor) -> Tensor:
    plan = _plans.find((), (x,))
    out = _fresh(x)
    plan(x, out)
    return out


def _kernel_out(x: Tensor, out: Tensor) -> None:
    plan = _plans.find((), (x,), (out,))
    check_output("logsumexp", "out", out, x=x)
    plan(x, out)


def _fake(x: Tensor) -> Tensor:
    _check(x)
    return _fresh(x)


_logsumexp = register("logsumexp(Tensor x) -> Tensor", _kernel, _fake, _check)
_logsumexp_out = register("logsumexp_out(Tensor x, Tensor(a!) out) -> ()", _kernel_out, _check, _check)
