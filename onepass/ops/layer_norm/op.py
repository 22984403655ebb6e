"""layer_norm: LayerNorm with a residual add before and an activation after it, in one pass over x."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import check_like, check_no_grad, check_tensor, check_vector
from onepass.ops.registration import register
from onepass.ops.rows import aligned_16, as_rows, check_output, copy_notes, overlaps, row_stride

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
    Arithmetic is in float32 with a centred variance; y is rounded once. A row's bits depend on N and the dtypes
    only, not on the other rows.

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
    _check(x, weight, bias, eps, activation, residual, out, residual_out)
    if out is None and residual_out is None:
        if residual is None:
            return _layer_norm(x, weight, bias, eps, activation)
        return _layer_norm_residual(x, residual, weight, bias, eps, activation)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        _layer_norm_out(x, weight, bias, eps, activation, out)
        return out
    if residual_out is None:
        residual_out = torch.empty_like(x, memory_format=torch.contiguous_format)
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
    return layer_norm(x, weight, bias, eps, activation="silu", out=out)  # type: ignore[return-value]


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
    _check(x, weight, bias, eps, activation, residual, out, residual_out)
    rows = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
    copied = tuple(name for name, t in rows.items() if t is not None and row_stride(t) is None)
    strided = [t for name, t in rows.items() if t is not None and name not in copied]
    aligned = aligned_16(x.element_size(), tuple(row_stride(t) or 0 for t in strided), *strided, weight, bias)
    return _desc(x, weight, bias, activation, residual is not None, aligned, copied)


def _check(
    x: Any, weight: Any, bias: Any, eps: Any, activation: Any, residual: Any, out: Any, residual_out: Any
) -> None:
    op = "layer_norm"
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    n, device = x.shape[-1], x.device
    if weight is not None:
        check_vector(op, "weight", weight, n, device)
    if bias is not None:
        check_vector(op, "bias", bias, n, device)
    if not isinstance(eps, (float, int, torch.SymFloat)):
        raise ArgumentTypeError(op, "eps", "a number", type(eps).__name__)
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(op, "activation", "one of " + ", ".join(map(repr, ACTIVATIONS)), repr(activation))
    if residual is not None:
        check_like(op, "residual", residual, x)
    if out is not None:
        check_like(op, "out", out, x)
    if residual_out is not None:
        if residual is None:
            raise ArgumentValueError(op, "residual_out", "None without 'residual'", "a tensor")
        check_like(op, "residual_out", residual_out, x)
    if torch.is_grad_enabled():
        check_no_grad(op, _UNFUSED, x=x, weight=weight, bias=bias, residual=residual)


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


def _launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    y: Tensor,
    residual_out: Tensor | None,
) -> None:
    """Run the chosen backend on checked arguments; `y` and `residual_out` have a single row stride."""
    if x.numel() == 0:
        return
    x, stride_x = as_rows(x)
    stride_r = stride_ro = 0
    if residual is not None:
        residual, stride_r = as_rows(residual)
        residual_out, stride_ro = as_rows(residual_out)  # type: ignore[arg-type]
    if weight is not None:
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    strides = RowStrides(stride_x, stride_r, as_rows(y)[1], stride_ro)
    aligned = aligned_16(x.element_size(), strides, x, weight, bias, residual, y, residual_out)
    desc = _desc(x, weight, bias, activation, residual is not None, aligned)
    dispatch.select("layer_norm", desc).run(desc, x, weight, bias, eps, residual, y, residual_out, strides)


def _contiguous_like(x: Tensor) -> Tensor:
    # empty_like keeps the strides of a dense tensor, so it is contiguous when x is, and cheaper without the argument.
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def _kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None) -> Tensor:
    y = _contiguous_like(x)
    _launch(x, weight, bias, eps, activation, None, y, None)
    return y


def _kernel_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor]:
    y, residual_out = _contiguous_like(x), _contiguous_like(x)
    _launch(x, weight, bias, eps, activation, residual, y, residual_out)
    return y, residual_out


def _kernel_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None, out: Tensor
) -> None:
    check_output("layer_norm", "out", out, x=x, weight=weight, bias=bias)
    y = out if row_stride(out) is not None else _contiguous_like(out)
    _launch(x, weight, bias, eps, activation, None, y, None)
    if y is not out:
        out.copy_(y)


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
    y = out if row_stride(out) is not None else _contiguous_like(out)
    total = residual_out if row_stride(residual_out) is not None else _contiguous_like(out)
    _launch(x, weight, bias, eps, activation, residual, y, total)
    if y is not out:
        out.copy_(y)
    if total is not residual_out:
        residual_out.copy_(total)


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation) -> Tensor",
    _kernel,
    lambda x, weight, bias, eps, activation: _contiguous_like(x),
)
_layer_norm_residual = register(
    "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation)"
    " -> (Tensor, Tensor)",
    _kernel_residual,
    lambda x, residual, weight, bias, eps, activation: (_contiguous_like(x), _contiguous_like(x)),
)
_layer_norm_out = register(
    "layer_norm_out(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation, Tensor(a!) out) -> ()",
    _kernel_out,
    lambda x, weight, bias, eps, activation, out: None,
)
_layer_norm_residual_out = register(
    "layer_norm_residual_out(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation,"
    " Tensor(a!) out, Tensor(b!) residual_out) -> ()",
    _kernel_residual_out,
    lambda x, residual, weight, bias, eps, activation, out, residual_out: None,
)
