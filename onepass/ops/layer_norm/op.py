"""layer_norm: LayerNorm with a residual add before and an activation after it, in one pass over x."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_like,
    check_tensor,
    check_vector,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.plans import Plan, Plans, metadata
from onepass.ops.registration import register
from onepass.ops.rows import (
    aligned_16,
    as_out_rows,
    as_rows,
    check_output,
    contiguous_like,
    copy_notes,
    overlaps,
    row_stride,
    strides_aligned_16,
)

ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")
_UNFUSED = "torch.nn.functional.layer_norm followed by the activation"


class Desc(NamedTuple):
    """What a layer_norm kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    num_rows: int
    hidden_size: int
    activation: str | None
    has_residual: bool
    aligned: bool
    """Every pointer and every row stride is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class RowStrides(NamedTuple):
    """Distance between rows in elements."""

    x: int
    residual: int
    y: int
    residual_out: int


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: None = None,
    out: Tensor | None = None,
    residual_out: None = None,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension, with a residual add before and an activation after it, in one kernel.

    y = activation((s - mean(s)) / sqrt(var(s) + eps) * weight + bias), s = x + residual rounded to x's dtype.
    Arithmetic is in float32 with a centred variance; y is rounded once. A row's bits depend on
    N, the dtypes, the alignment of memory and the backend, never on the other rows.

    Args:
        x: [..., N], float32, bfloat16 or float16, any row strides; other layouts are copied first.
        weight: [N] in any of these dtypes, or None for 1.
        bias: [N] in any of these dtypes, or None for 0.
        eps: added to the variance, inside the root.
        activation: None, "silu", "gelu" (with erf), "gelu_tanh" or "relu".
        residual: shape and dtype of x, added to x before the statistics.
        out: where y is written: shape and dtype of x; may be exactly x.
        residual_out: where x + residual is written; only with `residual`, may be exactly x or `residual`.

    Returns:
        y, shape and dtype of x; with `residual` the pair (y, x + residual).

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, activation name or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016.
    """
    _check_values(x, weight, bias, eps, activation, residual, out, residual_out)
    if out is None and residual_out is None:
        if residual is None:
            return _layer_norm(x, weight, bias, eps, activation)
        return _layer_norm_residual(x, residual, weight, bias, eps, activation)
    if out is None:
        out = contiguous_like(x)
    if residual is None:
        _layer_norm_out(x, weight, bias, eps, activation, out)
        return out
    if residual_out is None:
        residual_out = contiguous_like(x)
    _layer_norm_residual_out(x, residual, weight, bias, eps, activation, out, residual_out)
    return out, residual_out


def layer_norm_silu(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """silu(layer_norm(x)): the short form of `layer_norm(..., activation="silu")`."""
    return layer_norm(x, weight, bias, eps, activation="silu", out=out)


def describe(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check_values(x, weight, bias, eps, activation, residual, out, residual_out)
    _check_tensors(x, weight, bias, residual, out, residual_out)
    rows = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
    tensors = {**rows, "weight": weight, "bias": bias}
    copied = tuple(name for name, t in tensors.items() if t is not None and row_stride(t) is None)
    strides = [row_stride(t) or 0 for name, t in rows.items() if t is not None and name not in copied]
    if copied or out is None or (residual is not None and residual_out is None):
        strides.append(x.shape[-1])  # copies and fresh outputs are contiguous
    in_place = (t for name, t in tensors.items() if name not in copied)
    aligned = aligned_16(*in_place) and strides_aligned_16(x.element_size(), strides)
    return _desc(x, weight, bias, activation, residual is not None, aligned, copied)


def _check_values(
    x: Any, weight: Any, bias: Any, eps: Any, activation: Any, residual: Any, out: Any, residual_out: Any
) -> None:
    """What metadata says nothing about, in every call."""
    op = "layer_norm"
    optional = OPTIONAL_TENSOR
    if not (
        isinstance(x, Tensor)
        and isinstance(weight, optional)
        and isinstance(bias, optional)
        and isinstance(residual, optional)
        and isinstance(out, optional)
        and isinstance(residual_out, optional)
    ):
        raise_not_tensor(
            op, ("x",), x=x, weight=weight, bias=bias, residual=residual, out=out, residual_out=residual_out
        )
    if not isinstance(eps, (float, int, torch.SymFloat)):
        raise ArgumentTypeError(op, "eps", "a number", type(eps).__name__)
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(op, "activation", "one of " + ", ".join(map(repr, ACTIVATIONS)), repr(activation))
    if residual_out is not None and residual is None:
        raise ArgumentValueError(op, "residual_out", "None without 'residual'", "a tensor")
    if torch.is_grad_enabled() and any_requires_grad(x, weight, bias, residual, out, residual_out):
        inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        raise_requires_grad(op, _UNFUSED, **inputs, out=out, residual_out=residual_out)


def _check_tensors(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> None:
    """What metadata decides, once for each."""
    op = "layer_norm"
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    for argument, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(op, argument, vector, x)
    for argument, like in (("residual", residual), ("out", out), ("residual_out", residual_out)):
        if like is not None:
            check_like(op, argument, like, x)


def _desc(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    has_residual: bool,
    aligned: bool,
    copied: tuple[str, ...] = (),
) -> Desc:
    n = x.shape[-1]
    return Desc(
        x.device,
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        x.numel() // n if n else 0,
        n,
        activation,
        has_residual,
        aligned,
        copied,
    )


_plans = Plans()


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
    fresh: bool = False,
) -> None:
    """Run the plan of this call, made at its first time. Fresh outputs are as x's metadata says."""
    aligned = aligned_16(x, weight, bias, residual, y, residual_out)
    key = (
        dispatch.forced(),
        activation,
        aligned,
        metadata(x),
        metadata(weight),
        metadata(bias),
        metadata(residual),
        None if fresh else metadata(y),
        None if fresh else metadata(residual_out),
    )
    plan = _plans.get(key)
    if plan is None:
        _check_tensors(x, weight, bias, residual, y, residual_out)
        plan = _plans.keep(key, _plan(x, weight, bias, activation, residual, y, residual_out, aligned))
    plan(x, weight, bias, eps, residual, y, residual_out)


def _plan(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
    aligned: bool,
) -> Plan:
    if x.numel() == 0:
        return lambda *args: None
    tensors = (x, residual, y, residual_out, weight, bias)
    if all(t is None or row_stride(t) is not None for t in tensors):
        strides = RowStrides(*(0 if t is None else row_stride(t) or 0 for t in tensors[:4]))
        aligned = aligned and strides_aligned_16(x.element_size(), strides)
        desc = _desc(x, weight, bias, activation, residual is not None, aligned)
        return partial(dispatch.prepare("layer_norm", desc), strides)
    return partial(_run_on_copies, activation)


def _run_on_copies(
    activation: str | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
) -> None:
    """The slower path of rows.py."""
    x, residual, weight, bias = (None if t is None else as_rows(t) for t in (x, residual, weight, bias))  # type: ignore[assignment]
    y_rows, total_rows = as_out_rows(y), None if residual_out is None else as_out_rows(residual_out)
    _run(x, weight, bias, eps, activation, residual, y_rows, total_rows)
    for target, rows in ((y, y_rows), (residual_out, total_rows)):
        if rows is not target:
            target.copy_(rows)  # type: ignore[union-attr, arg-type]


def _kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None) -> Tensor:
    y = contiguous_like(x)
    _run(x, weight, bias, eps, activation, None, y, None, fresh=True)
    return y


def _kernel_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor]:
    y, residual_out = contiguous_like(x), contiguous_like(x)
    _run(x, weight, bias, eps, activation, residual, y, residual_out, fresh=True)
    return y, residual_out


def _kernel_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None, out: Tensor
) -> None:
    check_output("layer_norm", "out", out, x=x, weight=weight, bias=bias)
    _run(x, weight, bias, eps, activation, None, out, None)


def _kernel_residual_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    out: Tensor,
    residual_out: Tensor,
) -> None:
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    check_output("layer_norm", "out", out, **inputs)
    check_output("layer_norm", "residual_out", residual_out, **inputs)
    if out.numel() and (out.data_ptr() == residual_out.data_ptr() or overlaps(out, residual_out)):
        raise ArgumentValueError("layer_norm", "residual_out", "memory apart from 'out'", "an overlap with 'out'")
    _run(x, weight, bias, eps, activation, residual, out, residual_out)


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None) -> Tensor:
    _check_tensors(x, weight, bias, None, None, None)
    return contiguous_like(x)


def _fake_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor]:
    _check_tensors(x, weight, bias, residual, None, None)
    return contiguous_like(x), contiguous_like(x)


def _fake_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None, out: Tensor
) -> None:
    _check_tensors(x, weight, bias, None, out, None)


def _fake_residual_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    out: Tensor,
    residual_out: Tensor,
) -> None:
    _check_tensors(x, weight, bias, residual, out, residual_out)


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation) -> Tensor",
    _kernel,
    _fake,
)
_layer_norm_residual = register(
    "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation)"
    " -> (Tensor, Tensor)",
    _kernel_residual,
    _fake_residual,
)
_layer_norm_out = register(
    "layer_norm_out(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation, Tensor(a!) out) -> ()",
    _kernel_out,
    _fake_out,
)
_layer_norm_residual_out = register(
    "layer_norm_residual_out(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation,"
    " Tensor(a!) out, Tensor(b!) residual_out) -> ()",
    _kernel_residual_out,
    _fake_residual_out,
)
