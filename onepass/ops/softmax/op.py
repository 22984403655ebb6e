"""softmax: probabilities of the last dimension, with a temperature, in one pass over the logits."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
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

_UNFUSED = "torch.softmax(logits / temperature, -1)"
_MAX_FLOAT32 = torch.finfo(torch.float32).max


class Desc(NamedTuple):
    """What a softmax kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    num_rows: int
    vocab_size: int
    per_row: bool
    """Each row has a temperature of its own."""
    greedy: bool
    """A temperature may be 0."""
    aligned: bool
    """The pointers and row strides of logits and out are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class RowStrides(NamedTuple):
    """Distance between rows in elements."""

    logits: int
    temperature: int
    out: int


def softmax(logits: Tensor, *, temperature: float | Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """softmax(logits / temperature) over the last dimension, in one kernel (rows too long for it: two).

    Arithmetic is in float32, and a result is rounded once. -inf gives 0. A row is NaN where torch's is: with a NaN,
    with +inf, or when all of it is -inf. A row's bits depend on N, the dtype, the alignment of memory and the backend,
    never on the other rows. On a GPU, rows of more than 16384 elements that no cluster of blocks takes (`explain` says
    so) use a workspace of 8 bytes a chunk of 8 KB, from PyTorch's allocator.

    Args:
        logits: [..., N], float32, bfloat16 or float16, any row strides; other layouts are copied first.
        temperature: None for 1; a number, finite and not negative; or a float32 tensor [...], one for each row, on
            logits' device, where a negative number or NaN makes its row NaN. At temperature 0 the first of the largest
            logits has probability 1.
        out: where the result is written: shape and dtype of logits; may be exactly logits.

    Returns:
        The probabilities, shape and dtype of logits.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, temperature or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    number, temperatures = _split(temperature)
    if out is None:
        return _softmax(logits, temperatures, number)
    _softmax_out(logits, temperatures, number, out)
    return out


def describe(logits: Tensor, *, temperature: float | Tensor | None = None, out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    number, temperatures = _split(temperature)
    _check(logits, temperatures, number, out)
    tensors = {"logits": logits, "out": out}
    copied = tuple(name for name, t in tensors.items() if t is not None and row_stride(t) is None)
    if temperatures is not None and _temperature_stride(temperatures) is None:
        copied += ("temperature",)
    strides = [row_stride(t) or 0 for name, t in tensors.items() if t is not None and name not in copied]
    if copied or out is None:
        strides.append(logits.shape[-1])  # copies and fresh outputs are contiguous
    in_place = (t for name, t in tensors.items() if name not in copied)
    aligned = aligned_16(*in_place) and strides_aligned_16(logits.element_size(), strides)
    return _desc(logits, number, temperatures, aligned, copied)


def _split(temperature: Any) -> tuple[Any, Any]:
    """The temperature as (a number, one for each row); the number counts where there is no tensor."""
    if temperature is None:
        return 1.0, None
    if isinstance(temperature, Tensor):
        return 1.0, temperature
    if isinstance(temperature, bool):  # Plans takes True for 1
        raise ArgumentTypeError("softmax", "temperature", "a number, a torch.Tensor or None", "bool")
    return temperature, None


def _check(logits: Any, temperatures: Any, number: Any, out: Any = None) -> None:
    """Everything but overlaps of memory."""
    op = "softmax"
    tensors = {"logits": logits, "temperature": temperatures, "out": out}
    if not (isinstance(logits, Tensor) and all(isinstance(t, OPTIONAL_TENSOR) for t in tensors.values())):
        raise_not_tensor(op, ("logits",), **tensors)
    if not isinstance(number, (float, int, torch.SymFloat)):
        raise ArgumentTypeError(op, "temperature", "a number, a torch.Tensor or None", type(number).__name__)
    if not 0 <= number <= _MAX_FLOAT32:
        raise ArgumentValueError(op, "temperature", "a finite number that is not negative", number)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(op, _UNFUSED, **tensors)
    check_tensor(op, "logits", logits)
    if logits.ndim == 0:
        raise ArgumentValueError(op, "logits", "at least one dimension", "a scalar tensor")
    if temperatures is not None:
        if temperatures.dtype != torch.float32:
            raise ArgumentTypeError(op, "temperature", "float32", temperatures.dtype)
        if temperatures.shape != logits.shape[:-1]:
            expected = f"shape {list(logits.shape[:-1])}, one for each row of logits"
            raise ArgumentValueError(op, "temperature", expected, list(temperatures.shape))
        if temperatures.device != logits.device:
            raise ArgumentValueError(op, "temperature", f"the device of logits, {logits.device}", temperatures.device)
    if out is not None:
        check_like(op, "out", out, logits, "logits")


def _desc(
    logits: Tensor, number: float, temperatures: Tensor | None, aligned: bool, copied: tuple[str, ...] = ()
) -> Desc:
    n = logits.shape[-1]
    per_row = temperatures is not None
    num_rows = logits.numel() // n if n else 0
    return Desc(logits.device, logits.dtype, num_rows, n, per_row, per_row or number == 0, aligned, copied)


def _temperature_stride(temperatures: Tensor) -> int | None:
    return row_stride(temperatures.unsqueeze(-1))


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    (number,) = values
    logits, *outputs, temperatures = tensors
    _check(logits, temperatures, number, *outputs)
    assert logits is not None
    if logits.numel() == 0:
        return lambda *args: None
    strides = [row_stride(t) for t in (logits, *outputs) if t is not None]
    temperature_stride = 0 if temperatures is None else _temperature_stride(temperatures)
    if None in strides or temperature_stride is None:
        return partial(_run_on_copies, number)
    row_strides = RowStrides(strides[0] or 0, temperature_stride, strides[1] or 0 if outputs else logits.shape[-1])
    aligned = aligned and strides_aligned_16(logits.element_size(), (row_strides.logits, row_strides.out))
    desc = _desc(logits, number, temperatures, aligned)
    return partial(dispatch.prepare("softmax", desc), row_strides, float(number))


_plans = Plans(_make_plan)


def _run_on_copies(number: float, logits: Tensor, temperatures: Tensor | None, out: Tensor) -> None:
    """The slower path of rows.py."""
    logits, rows = as_rows(logits), as_out_rows(out)
    if temperatures is not None:
        temperatures = temperatures.contiguous()
    _plans.find((number,), (logits, rows), (temperatures,))(logits, temperatures, rows)
    if rows is not out:
        out.copy_(rows)


def _kernel(logits: Tensor, temperatures: Tensor | None, number: float) -> Tensor:
    plan = _plans.find((number,), (logits,), (temperatures,))
    out = contiguous_like(logits)
    plan(logits, temperatures, out)
    return out


def _kernel_out(logits: Tensor, temperatures: Tensor | None, number: float, out: Tensor) -> None:
    plan = _plans.find((number,), (logits, out), (temperatures,))
    check_output("softmax", "out", out, logits=logits, temperature=temperatures)
    plan(logits, temperatures, out)


def _fake(logits: Tensor, temperatures: Tensor | None, number: float) -> Tensor:
    _check(logits, temperatures, number)
    return contiguous_like(logits)


_softmax = register("softmax(Tensor logits, Tensor? temperatures, float number) -> Tensor", _kernel, _fake, _check)
_softmax_out = register(
    "softmax_out(Tensor logits, Tensor? temperatures, float number, Tensor(a!) out) -> ()", _kernel_out, _check, _check
)
