"""softmax_weighted_sum: softmax(logits) and the weighted sum of values, without the weights in memory."""

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
from onepass.ops.rows import (
    aligned_16,
    as_out_rows,
    as_rows,
    check_output,
    copy_notes,
    row_stride,
    strides_aligned_16,
)

_UNFUSED = "torch.softmax(logits, -1) and torch.matmul"


class Desc(NamedTuple):
    """What a softmax_weighted_sum kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    """Of the values and the result."""
    logits_dtype: torch.dtype
    num_rows: int
    num_values: int
    """What a row's sum runs over: N."""
    width: int
    """Of a value: D."""
    shared: bool
    """All rows have the same values."""
    aligned: bool
    """The pointers and strides of values and out are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class Strides(NamedTuple):
    """Distances in elements: between rows, and between the values of a row."""

    logits: int
    values_row: int
    values: int
    out: int


def softmax_weighted_sum(logits: Tensor, values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """sum over n of softmax(logits)[..., n] * values[..., n, :], in one kernel; the weights never reach memory.

    Arithmetic is in float32. Where all rows share half-precision values, a GPU's weights are rounded to the values'
    dtype, as the unfused ops do, for the matrix units. Special values are as torch's: a row of logits with a NaN, with
    +inf or with nothing but -inf gives NaN, and a NaN among a row's values makes its column NaN, whatever its weight.
    A row's bits depend on N, D, the dtypes, the alignment of memory and the backend, never on the other rows.

    Args:
        logits: [..., N], N at least 1, float32, bfloat16 or float16, any row strides; other layouts are copied first.
        values: [..., N, D] with the leading dimensions of logits, or [N, D] for all rows alike; any of these dtypes.
            Copied first unless the last dimension is contiguous and a single stride leads from row to row.
        out: [..., D] in values' dtype, where the result is written; its memory is apart from the inputs'.

    Returns:
        [..., D], dtype of values.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if out is None:
        return _sum(logits, values)
    _sum_out(logits, values, out)
    return out


def describe(logits: Tensor, values: Tensor, *, out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(logits, values, out)
    strides, copied = _strides(logits, values, out)
    in_place = [t for name, t in (("values", values), ("out", out)) if name not in copied]
    return _desc(logits, values, aligned_16(*in_place) and _strides_aligned(values, strides), copied)


def _check(logits: Any, values: Any, out: Any = None) -> None:
    """Everything but overlaps of memory."""
    op = "softmax_weighted_sum"
    tensors = {"logits": logits, "values": values, "out": out}
    if not (isinstance(logits, Tensor) and isinstance(values, Tensor) and isinstance(out, OPTIONAL_TENSOR)):
        raise_not_tensor(op, ("logits", "values"), **tensors)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(op, _UNFUSED, **tensors)
    check_tensor(op, "logits", logits)
    check_tensor(op, "values", values)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ArgumentValueError(op, "logits", "a last dimension of at least 1", list(logits.shape))
    if values.shape[:-1] != (logits.shape[-1:] if values.ndim == 2 else logits.shape):
        expected = f"shape {[*logits.shape, 'D']} or {[logits.shape[-1], 'D']}"
        raise ArgumentValueError(op, "values", expected, list(values.shape))
    if values.device != logits.device:
        raise ArgumentValueError(op, "values", f"the device of logits, {logits.device}", values.device)
    if out is not None:
        expected_shape = _result_shape(logits, values)
        if out.dtype != values.dtype:
            raise ArgumentTypeError(op, "out", f"the dtype of values, {values.dtype}", out.dtype)
        if out.shape != expected_shape:
            raise ArgumentValueError(op, "out", f"shape {list(expected_shape)}", list(out.shape))
        if out.device != logits.device:
            raise ArgumentValueError(op, "out", f"the device of logits, {logits.device}", out.device)


def _result_shape(logits: Tensor, values: Tensor) -> tuple[int, ...]:
    return (*logits.shape[:-1], values.shape[-1])


def _value_strides(values: Tensor) -> tuple[int, int] | None:
    """The distances between rows and between a row's values; None where there are no such two."""
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        return None
    if values.ndim == 2:
        return 0, values.stride(0)
    if math.prod(values.shape[:-2]) == 1:
        return 0, values.stride(-2)
    between_rows = row_stride(values[..., 0, :1])
    return None if between_rows is None else (between_rows, values.stride(-2))


def _strides(logits: Tensor, values: Tensor, out: Tensor | None) -> tuple[Strides, tuple[str, ...]]:
    """The strides of a call, with those of contiguous memory for what is copied, and the names of that."""
    n, width = logits.shape[-1], values.shape[-1]
    of_logits, of_values = row_stride(logits), _value_strides(values)
    of_out = width if out is None else row_stride(out)
    found = {"logits": of_logits, "values": of_values, "out": of_out}
    copied = tuple(name for name, stride in found.items() if stride is None)
    between_rows, between = of_values if of_values is not None else (0 if values.ndim == 2 else n * width, width)
    strides = Strides(n if of_logits is None else of_logits, between_rows, between, width if of_out is None else of_out)
    return strides, copied


def _strides_aligned(values: Tensor, strides: Strides) -> bool:
    return strides_aligned_16(values.element_size(), (strides.values_row, strides.values, strides.out))


def _desc(logits: Tensor, values: Tensor, aligned: bool, copied: tuple[str, ...] = ()) -> Desc:
    num_rows = math.prod(logits.shape[:-1])
    n, width = values.shape[-2:]
    return Desc(logits.device, values.dtype, logits.dtype, num_rows, n, width, values.ndim == 2, aligned, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    table, *outputs, logits = tensors
    _check(logits, table, *outputs)
    assert logits is not None
    assert table is not None
    if logits.numel() == 0 or table.numel() == 0:
        return lambda *args: None
    strides, copied = _strides(logits, table, *(outputs or (None,)))
    if copied:
        return _run_on_copies
    desc = _desc(logits, table, aligned and _strides_aligned(table, strides))
    return partial(dispatch.prepare("softmax_weighted_sum", desc), strides)


_plans = Plans(_make_plan)


def _run_on_copies(logits: Tensor, values: Tensor, out: Tensor) -> None:
    """The slower path of rows.py."""
    logits, rows = as_rows(logits), as_out_rows(out)
    values = values if _value_strides(values) is not None else values.contiguous()
    _plans.find((), (values, rows), (logits,))(logits, values, rows)
    if rows is not out:
        out.copy_(rows)


def _fresh(logits: Tensor, values: Tensor) -> Tensor:
    return torch.empty(_result_shape(logits, values), dtype=values.dtype, device=values.device)


def _kernel(logits: Tensor, values: Tensor) -> Tensor:
    plan = _plans.find((), (values,), (logits,))
    out = _fresh(logits, values)
    plan(logits, values, out)
    return out


def _kernel_out(logits: Tensor, values: Tensor, out: Tensor) -> None:
    plan = _plans.find((), (values, out), (logits,))
    check_output("softmax_weighted_sum", "out", out, logits=logits, values=values)
    for name, t in (("logits", logits), ("values", values)):
        if out.data_ptr() == t.data_ptr() and out.numel():
            raise ArgumentValueError(
                "softmax_weighted_sum", "out", f"memory apart from '{name}'", f"the memory of '{name}'"
            )
    plan(logits, values, out)


def _fake(logits: Tensor, values: Tensor) -> Tensor:
    _check(logits, values)
    return _fresh(logits, values)


_sum = register("softmax_weighted_sum(Tensor logits, Tensor values) -> Tensor", _kernel, _fake, _check)
_sum_out = register(
    "softmax_weighted_sum_out(Tensor logits, Tensor values, Tensor(a!) out) -> ()", _kernel_out, _check, _check
)
