"""Gated activations: activation(gate) * up, for gate and up in one packed tensor or in two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

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

PACKED = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "relu": "relu_and_mul"}
SEPARATE = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}
"""What the public functions are called: errors name the one that was called."""

_APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}
_UNFUSED = "activation of torch.nn.functional, then the product"


class Desc(NamedTuple):
    """What a gated_activation kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    activation: str
    packed: bool
    """Gate and up are the halves of each row of one tensor."""
    num_rows: int
    """1 when gate, up and out are contiguous tensors of their own: they are then one long row."""
    num_cols: int
    """Of the output."""
    aligned: bool
    """Every pointer and every row stride is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class RowStrides(NamedTuple):
    """Distance between rows in elements."""

    gate: int
    up: int
    out: int


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, gate and up being the left and the right half of each row of x, in one kernel.

    Arithmetic is in float32, and the product is rounded once; the unfused pair rounds silu(gate) as well. To write over
    one of the halves, call `swiglu` with the halves.

    Args:
        x: [..., 2 * intermediate_size], float32, bfloat16 or float16, any row strides; other layouts are copied first.
        out: where the result is written: [..., intermediate_size] in x's dtype, apart from x.

    Returns:
        [..., intermediate_size] in x's dtype.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: the last dimension is odd, or a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _run_packed(x, "silu", out)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu(gate) * up, GELU in its exact form, with erf; everything else as in `silu_and_mul`."""
    return _run_packed(x, "gelu", out)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """gelu(gate) * up, GELU in its tanh form; everything else as in `silu_and_mul`."""
    return _run_packed(x, "gelu_tanh", out)


def relu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """relu(gate) * up; everything else as in `silu_and_mul`."""
    return _run_packed(x, "relu", out)


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up in one kernel, of two tensors. They may be views of one, such as its halves: nothing is copied.

    Args:
        gate: any shape, float32, bfloat16 or float16, any row strides; other layouts are copied first.
        up: shape, dtype and device of gate; nothing is broadcast.
        out: where the result is written: shape and dtype of gate; may be exactly gate or exactly up.

    Returns:
        silu(gate) * up, shape and dtype of gate, the product rounded once.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _run_separate(gate, up, "silu", out)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none", out: Tensor | None = None
) -> Tensor:
    """gelu(gate) * up in one kernel, of two tensors; everything else as in `swiglu`.

    Args:
        gate: as in `swiglu`.
        up: as in `swiglu`.
        approximate: "none" for GELU's exact form, with erf, or "tanh", as in torch.
        out: as in `swiglu`.
    """
    return _run_separate(gate, up, _gelu(approximate), out)


def gated_activation(
    x: Tensor, up: Tensor | None = None, *, activation: str = "silu", out: Tensor | None = None
) -> Tensor:
    """activation(gate) * up, in the form that the arguments say: x is packed, or with `up` the gate."""
    return _run_packed(x, activation, out) if up is None else _run_separate(x, up, activation, out)


def describe(x: Tensor, up: Tensor | None = None, *, activation: str = "silu", out: Tensor | None = None) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(up is None, x, up, activation, out)
    names = ("x", "out") if up is None else ("gate", "up", "out")
    tensors = [t for t in (x, up, out) if t is not None]
    operands = dict(zip(names, tensors, strict=False))
    copied = tuple(name for name, t in operands.items() if row_stride(t) is None)
    in_place = [t for name, t in operands.items() if name not in copied]
    return _desc(x, up, activation, in_place, aligned_16(*in_place), bool(copied) or out is None, copied)


describe_silu_and_mul = partial(describe, activation="silu")
describe_gelu_and_mul = partial(describe, activation="gelu")
describe_gelu_tanh_and_mul = partial(describe, activation="gelu_tanh")
describe_relu_and_mul = partial(describe, activation="relu")


def describe_swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Desc:
    return describe(gate, up, activation="silu", out=out)


def describe_geglu(gate: Tensor, up: Tensor, *, approximate: str = "none", out: Tensor | None = None) -> Desc:
    return describe(gate, up, activation=_gelu(approximate), out=out)


def _gelu(approximate: Any) -> str:
    activation = _APPROXIMATIONS.get(approximate) if isinstance(approximate, str) else None
    if activation is None:
        raise ArgumentValueError("geglu", "approximate", "'none' or 'tanh'", repr(approximate))
    return activation


def _run_packed(x: Tensor, activation: str, out: Tensor | None) -> Tensor:
    if out is None:
        return _packed(x, activation)  # type: ignore[no-any-return]
    _packed_out(x, activation, out)
    return out


def _run_separate(gate: Tensor, up: Tensor, activation: str, out: Tensor | None) -> Tensor:
    if out is None:
        return _separate(gate, up, activation)  # type: ignore[no-any-return]
    _separate_out(gate, up, activation, out)
    return out


def _check(packed: bool, x: Any, up: Any, activation: Any, out: Any = None) -> None:
    """Everything but overlaps of memory; `up` is None where x is packed, and x the gate where it is not."""
    if activation not in PACKED:
        expected = "one of " + ", ".join(map(repr, PACKED))
        raise ArgumentValueError("gated_activation", "activation", expected, repr(activation))
    op = PACKED[activation] if packed else SEPARATE.get(activation, "gated_activation")
    tensors = {"x": x, "out": out} if packed else {"gate": x, "up": up, "out": out}
    if not (isinstance(x, Tensor) and (packed or isinstance(up, Tensor)) and isinstance(out, OPTIONAL_TENSOR)):
        raise_not_tensor(op, ("x", "gate", "up"), **tensors)
    if torch.is_grad_enabled() and any_requires_grad(x, up, out):
        raise_requires_grad(op, _UNFUSED, **tensors)
    check_tensor(op, "x" if packed else "gate", x)
    if packed:
        _check_packed(op, x, out)
        return
    for argument in ("up", "out"):
        if tensors[argument] is not None:
            check_like(op, argument, tensors[argument], x, "gate")


def _check_packed(op: str, x: Tensor, out: Tensor | None) -> None:
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    if x.shape[-1] % 2:
        raise ArgumentValueError(op, "x", "an even last dimension, gate and up", list(x.shape))
    if out is None:
        return
    shape = _packed_shape(x)
    if out.dtype != x.dtype:
        raise ArgumentTypeError(op, "out", f"the dtype of x, {x.dtype}", out.dtype)
    if out.shape != torch.Size(shape):
        raise ArgumentValueError(op, "out", f"half the last dimension of x, {list(shape)}", list(out.shape))
    if out.device != x.device:
        raise ArgumentValueError(op, "out", f"the device of x, {x.device}", out.device)


def _check_packed_call(x: Any, activation: Any, out: Any = None) -> None:
    _check(True, x, None, activation, out)


def _check_separate_call(gate: Any, up: Any, activation: Any, out: Any = None) -> None:
    _check(False, gate, up, activation, out)


def _packed_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


def _desc(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    operands: Sequence[Tensor],
    aligned: bool,
    any_fresh: bool,
    copied: tuple[str, ...] = (),
) -> Desc:
    """`operands` are used where they lie; `any_fresh`: others are fresh, contiguous memory."""
    packed = up is None
    flat = not packed and all(t.is_contiguous() for t in operands)
    num_cols = x.numel() if flat else x.shape[-1] // (2 if packed else 1)
    num_rows = 1 if flat or not num_cols else x.numel() // x.shape[-1]
    if not flat:
        strides = [row_stride(t) or 0 for t in operands] + [num_cols] * (packed or any_fresh)  # packed: up's place too
        aligned = aligned and strides_aligned_16(x.element_size(), strides)
    return Desc(x.device, x.dtype, activation, packed, num_rows, num_cols, aligned, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    activation, packed = values
    x, up, *outputs = tensors
    _check(packed, x, up, activation, *outputs)
    assert x is not None
    if x.numel() == 0:
        return lambda *args: None
    operands = [t for t in tensors if t is not None]
    if any(row_stride(t) is None for t in operands):
        return partial(_run_on_copies, values)
    desc = _desc(x, up, activation, operands, aligned, not outputs)
    gate = _stride(x)
    (out,) = [_stride(t) for t in outputs if t is not None] or [_fresh_stride(x, up)]
    strides = RowStrides(gate, gate if up is None else _stride(up), out)
    return partial(dispatch.prepare("gated_activation", desc), strides)


def _stride(t: Tensor) -> int:
    return row_stride(t) or 0


def _fresh_stride(x: Tensor, up: Tensor | None) -> int:
    """Of a contiguous output."""
    if up is None:
        return x.shape[-1] // 2
    return x.shape[-1] if x.ndim else 1


_plans = Plans(_make_plan)


def _run_on_copies(values: tuple[Any, ...], x: Tensor, up: Tensor | None, out: Tensor) -> None:
    """The slower path of rows.py."""
    rows = as_out_rows(out)
    x, up = as_rows(x), None if up is None else as_rows(up)
    _plans.find(values, (x, up, rows))(x, up, rows)
    if rows is not out:
        out.copy_(rows)


def _packed_kernel(x: Tensor, activation: str) -> Tensor:
    plan = _plans.find((activation, True), (x, None))
    out = x.new_empty(_packed_shape(x))
    plan(x, None, out)
    return out


def _packed_kernel_out(x: Tensor, activation: str, out: Tensor) -> None:
    plan = _plans.find((activation, True), (x, None, out))
    check_output(PACKED[activation], "out", out, x=x)
    plan(x, None, out)


def _separate_kernel(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    plan = _plans.find((activation, False), (gate, up))
    out = contiguous_like(gate)
    plan(gate, up, out)
    return out


def _separate_kernel_out(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    plan = _plans.find((activation, False), (gate, up, out))
    check_output(SEPARATE.get(activation, "gated_activation"), "out", out, gate=gate, up=up)
    plan(gate, up, out)


def _packed_fake(x: Tensor, activation: str) -> Tensor:
    _check_packed_call(x, activation)
    return x.new_empty(_packed_shape(x))


def _separate_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check_separate_call(gate, up, activation)
    return contiguous_like(gate)


_packed = register(
    "gated_activation_packed(Tensor x, str activation) -> Tensor", _packed_kernel, _packed_fake, _check_packed_call
)
_packed_out = register(
    "gated_activation_packed_out(Tensor x, str activation, Tensor(a!) out) -> ()",
    _packed_kernel_out,
    _check_packed_call,
    _check_packed_call,
)
_separate = register(
    "gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    _separate_kernel,
    _separate_fake,
    _check_separate_call,
)
_separate_out = register(
    "gated_activation_out(Tensor gate, Tensor up, str activation, Tensor(a!) out) -> ()",
    _separate_kernel_out,
    _check_separate_call,
    _check_separate_call,
)
