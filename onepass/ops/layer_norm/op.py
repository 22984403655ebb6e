"""layer_norm: LayerNorm with a residual add before and an activation after it, in one pass over x."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.activations import ACTIVATIONS
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_like,
    check_tensor,
    check_vector,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.norm_call import NormPlans, layout
from onepass.ops.registration import register
from onepass.ops.rows import (
    check_output,
    check_outputs,
    contiguous_like,
    copy_notes,
)

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
    if residual_out is not None and residual is None:
        raise ArgumentValueError("layer_norm", "residual_out", "None without 'residual'", "a tensor")
    if out is None and residual_out is None:
        if residual is None:
            return _layer_norm(x, weight, bias, eps, activation)
        return _layer_norm_residual(x, residual, weight, bias, eps, activation)
    if out is None:
        _check_inputs(x, weight, bias, eps, activation)
        out = contiguous_like(x)
    if residual is None:
        _layer_norm_out(x, weight, bias, eps, activation, out)
        return out
    if residual_out is None:
        _check_inputs(x, weight, bias, eps, activation)
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
    _check(x, residual, weight, bias, eps, activation, out, residual_out)
    aligned, copied = layout(x, residual, out, residual_out, weight=weight, bias=bias)
    return _desc(x, residual, weight, bias, eps, activation, aligned, copied)


def _check(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: Any,
    out: Any = None,
    residual_out: Any = None,
) -> None:
    """Everything but overlaps of memory."""
    op = "layer_norm"
    tensors = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "out": out,
        "residual_out": residual_out,
    }
    if not (isinstance(x, Tensor) and all(isinstance(t, OPTIONAL_TENSOR) for t in tensors.values())):
        raise_not_tensor(op, ("x",), **tensors)
    if not isinstance(eps, (float, int, torch.SymFloat)):
        raise ArgumentTypeError(op, "eps", "a number", type(eps).__name__)
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(op, "activation", "one of " + ", ".join(map(repr, ACTIVATIONS)), repr(activation))
    if residual_out is not None and residual is None:
        raise ArgumentValueError(op, "residual_out", "None without 'residual'", "a tensor")
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(op, _UNFUSED, **tensors)
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    for argument in ("weight", "bias"):
        if tensors[argument] is not None:
            check_vector(op, argument, tensors[argument], x)
    for argument in ("residual", "out", "residual_out"):
        if tensors[argument] is not None:
            check_like(op, argument, tensors[argument], x)


def _check_inputs(x: Any, weight: Any, bias: Any, eps: Any, activation: Any) -> None:
    _check(x, None, weight, bias, eps, activation)


def _check_out(x: Any, weight: Any, bias: Any, eps: Any, activation: Any, out: Any) -> None:
    _check(x, None, weight, bias, eps, activation, out)


def _desc(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
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
        residual is not None,
        aligned,
        copied,
    )


_plans = NormPlans("layer_norm", 2, (0,), _check, _desc)


def _kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None) -> Tensor:
    plan = _plans.find((eps, activation), (x, None, weight, bias))
    y = contiguous_like(x)
    plan(x, None, weight, bias, y, None)
    return y


def _kernel_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor]:
    plan = _plans.find((eps, activation), (x, residual, weight, bias))
    y, residual_out = contiguous_like(x), contiguous_like(x)
    plan(x, residual, weight, bias, y, residual_out)
    return y, residual_out


def _kernel_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None, out: Tensor
) -> None:
    plan = _plans.find((eps, activation), (x, None, weight, bias, out, None))
    check_output("layer_norm", "out", out, x=x, weight=weight, bias=bias)
    plan(x, None, weight, bias, out, None)


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
    plan = _plans.find((eps, activation), (x, residual, weight, bias, out, residual_out))
    outputs = {"out": out, "residual_out": residual_out}
    check_outputs("layer_norm", outputs, x=x, residual=residual, weight=weight, bias=bias)
    plan(x, residual, weight, bias, out, residual_out)


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None) -> Tensor:
    _check_inputs(x, weight, bias, eps, activation)
    return contiguous_like(x)


def _fake_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias, eps, activation)
    return contiguous_like(x), contiguous_like(x)


_layer_norm = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation) -> Tensor",
    _kernel,
    _fake,
    _check_inputs,
)
_layer_norm_residual = register(
    "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation)"
    " -> (Tensor, Tensor)",
    _kernel_residual,
    _fake_residual,
    _check,
)
_layer_norm_out = register(
    "layer_norm_out(Tensor x, Tensor? weight, Tensor? bias, float eps, str? activation, Tensor(a!) out) -> ()",
    _kernel_out,
    _check_out,
    _check_out,
)
_layer_norm_residual_out = register(
    "layer_norm_residual_out(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, str? activation,"
    " Tensor(a!) out, Tensor(b!) residual_out) -> ()",
    _kernel_residual_out,
    _check,
    _check,
)
