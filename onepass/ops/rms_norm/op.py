"""rms_norm: RMSNorm with a residual add before and an activation after it, in one pass over x."""

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

CASTINGS = ("llama", "gemma")
_UNFUSED = "torch.nn.functional.rms_norm followed by the activation"
_NUMBERS = (float, int, torch.SymFloat)


class Desc(NamedTuple):
    """What an rms_norm kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    num_rows: int
    hidden_size: int
    activation: str | None
    has_residual: bool
    has_weight_offset: bool
    rounds_before_weight: bool
    """The normalised value is rounded to `dtype` before it is multiplied with the weight."""
    aligned: bool
    """Every pointer and every row stride is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: None = None,
    weight_offset: float = 0.0,
    casting: str = "llama",
    out: Tensor | None = None,
    residual_out: None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: Tensor,
    weight_offset: float = 0.0,
    casting: str = "llama",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    casting: str = "llama",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, with a residual add before and an activation after it, in one kernel.

    y = activation(s / sqrt(mean(s * s) + eps) * (weight_offset + weight)), s = x + residual rounded to x's dtype.
    Arithmetic is in float32; y is rounded once, and before that as `casting` says. A row's bits depend on N, the
    dtypes, the alignment of memory and the backend, never on the other rows. Squares are float32: a row of
    magnitudes past 1.8e19 gives 0, as in torch.

    Args:
        x: [..., N], float32, bfloat16 or float16, any row strides; other layouts are copied first.
        weight: [N] in any of these dtypes, or None for 1. The result has x's dtype whatever the weight's.
        eps: added to the mean square, inside the root.
        activation: None, "silu", "gelu" (with erf), "gelu_tanh" or "relu".
        residual: shape and dtype of x, added to x before the statistics.
        weight_offset: added to the weight in float32, with either casting; only with `weight`. Gemma's is 1.
        casting: "llama" rounds the normalised value to x's dtype before it is multiplied with a weight; "gemma" keeps
            it in float32.
        out: where y is written: shape and dtype of x; may be exactly x.
        residual_out: where x + residual is written; only with `residual`, may be exactly x or `residual`.

    Returns:
        y, shape and dtype of x; with `residual` the pair (y, x + residual).

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, activation or casting name or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019; the castings are those of the Llama and
    Gemma models in Hugging Face's transformers.
    """
    if residual_out is not None and residual is None:
        raise ArgumentValueError("rms_norm", "residual_out", "None without 'residual'", "a tensor")
    numbers = (eps, activation, weight_offset, casting)
    if out is None and residual_out is None:
        if residual is None:
            return _rms_norm(x, weight, *numbers)
        return _rms_norm_residual(x, residual, weight, *numbers)
    if out is None:
        _check_inputs(x, weight, *numbers)
        out = contiguous_like(x)
    if residual is None:
        _rms_norm_out(x, weight, *numbers, out)
        return out
    if residual_out is None:
        _check_inputs(x, weight, *numbers)
        residual_out = contiguous_like(x)
    _rms_norm_residual_out(x, residual, weight, *numbers, out, residual_out)
    return out, residual_out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y, x + residual): the usual name for `rms_norm(x, weight, eps, residual=residual)`.

    Args:
        x: as in `rms_norm`.
        residual: as in `rms_norm`.
        weight: as in `rms_norm`.
        eps: as in `rms_norm`.
        weight_offset: 0 for Llama's norm; another value, as Gemma's 1, also takes Gemma's casting.
    """
    _check_present(residual)
    casting = _casting(weight_offset)
    return _rms_norm_residual(x, residual, weight, eps, None, weight_offset, casting)  # type: ignore[no-any-return]


def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> None:
    """`fused_add_rms_norm` in place: `residual` becomes x + residual, and x becomes y.

    Args:
        x: as in `rms_norm`; overwritten.
        residual: as in `rms_norm`, apart from x; overwritten.
        weight: as in `rms_norm`.
        eps: as in `rms_norm`.
        weight_offset: 0 for Llama's norm; another value, as Gemma's 1, also takes Gemma's casting.
    """
    _check_present(residual)
    _rms_norm_residual_out(x, residual, weight, eps, None, weight_offset, _casting(weight_offset), x, residual)


def _check_present(residual: Any) -> None:
    if residual is None:
        raise ArgumentTypeError("rms_norm", "residual", "a torch.Tensor", "NoneType")


def _casting(weight_offset: float) -> str:
    """No model has an offset with Llama's casting."""
    return "gemma" if weight_offset else "llama"


def describe(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    casting: str = "llama",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(x, residual, weight, eps, activation, weight_offset, casting, out, residual_out)
    aligned, copied = layout(x, residual, out, residual_out, weight=weight)
    return _desc(x, residual, weight, eps, activation, weight_offset, casting, aligned, copied)


def describe_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> Desc:
    """The Desc of a call of `fused_add_rms_norm`."""
    _check_present(residual)
    casting = _casting(weight_offset)
    return describe(x, weight, eps, residual=residual, weight_offset=weight_offset, casting=casting)


def describe_fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> Desc:
    """The Desc of a call of `fused_add_rms_norm_`."""
    _check_present(residual)
    options = {"weight_offset": weight_offset, "casting": _casting(weight_offset)}
    return describe(x, weight, eps, residual=residual, out=x, residual_out=residual, **options)  # type: ignore[arg-type]


def _check(
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    activation: Any,
    weight_offset: Any,
    casting: Any,
    out: Any = None,
    residual_out: Any = None,
) -> None:
    """Everything but overlaps of memory."""
    op = "rms_norm"
    tensors = {"x": x, "weight": weight, "residual": residual, "out": out, "residual_out": residual_out}
    if not (isinstance(x, Tensor) and all(isinstance(t, OPTIONAL_TENSOR) for t in tensors.values())):
        raise_not_tensor(op, ("x",), **tensors)
    for argument, number in (("eps", eps), ("weight_offset", weight_offset)):
        if not isinstance(number, _NUMBERS):
            raise ArgumentTypeError(op, argument, "a number", type(number).__name__)
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(op, "activation", "one of " + ", ".join(map(repr, ACTIVATIONS)), repr(activation))
    if casting not in CASTINGS:
        raise ArgumentValueError(op, "casting", "one of " + ", ".join(map(repr, CASTINGS)), repr(casting))
    if weight is None and weight_offset != 0:
        raise ArgumentValueError(op, "weight_offset", "0 without 'weight'", weight_offset)
    if residual_out is not None and residual is None:
        raise ArgumentValueError(op, "residual_out", "None without 'residual'", "a tensor")
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(op, _UNFUSED, **tensors)
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ArgumentValueError(op, "x", "at least one dimension", "a scalar tensor")
    if weight is not None:
        check_vector(op, "weight", weight, x)
    for argument in ("residual", "out", "residual_out"):
        if tensors[argument] is not None:
            check_like(op, argument, tensors[argument], x)


def _check_inputs(x: Any, weight: Any, eps: Any, activation: Any, weight_offset: Any, casting: Any) -> None:
    _check(x, None, weight, eps, activation, weight_offset, casting)


def _check_out(x: Any, weight: Any, eps: Any, activation: Any, weight_offset: Any, casting: Any, out: Any) -> None:
    _check(x, None, weight, eps, activation, weight_offset, casting, out)


def _desc(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    activation: str | None,
    weight_offset: float,
    casting: str,
    aligned: bool,
    copied: tuple[str, ...] = (),
) -> Desc:
    n = x.shape[-1]
    return Desc(
        x.device,
        x.dtype,
        None if weight is None else weight.dtype,
        x.numel() // n if n else 0,
        n,
        activation,
        residual is not None,
        weight_offset != 0,
        casting == "llama" and weight is not None and x.dtype != torch.float32,
        aligned,
        copied,
    )


_plans = NormPlans("rms_norm", 1, (0, 2), _check, _desc)


def _kernel(
    x: Tensor, weight: Tensor | None, eps: float, activation: str | None, weight_offset: float, casting: str
) -> Tensor:
    plan = _plans.find((eps, activation, weight_offset, casting), (x, None, weight))
    y = contiguous_like(x)
    plan(x, None, weight, y, None)
    return y


def _kernel_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str | None,
    weight_offset: float,
    casting: str,
) -> tuple[Tensor, Tensor]:
    plan = _plans.find((eps, activation, weight_offset, casting), (x, residual, weight))
    y, residual_out = contiguous_like(x), contiguous_like(x)
    plan(x, residual, weight, y, residual_out)
    return y, residual_out


def _kernel_out(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str | None,
    weight_offset: float,
    casting: str,
    out: Tensor,
) -> None:
    plan = _plans.find((eps, activation, weight_offset, casting), (x, None, weight, out, None))
    check_output("rms_norm", "out", out, x=x, weight=weight)
    plan(x, None, weight, out, None)


def _kernel_residual_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str | None,
    weight_offset: float,
    casting: str,
    out: Tensor,
    residual_out: Tensor,
) -> None:
    plan = _plans.find((eps, activation, weight_offset, casting), (x, residual, weight, out, residual_out))
    outputs = {"out": out, "residual_out": residual_out}
    check_outputs("rms_norm", outputs, x=x, residual=residual, weight=weight)
    plan(x, residual, weight, out, residual_out)


def _fake(
    x: Tensor, weight: Tensor | None, eps: float, activation: str | None, weight_offset: float, casting: str
) -> Tensor:
    _check_inputs(x, weight, eps, activation, weight_offset, casting)
    return contiguous_like(x)


def _fake_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str | None,
    weight_offset: float,
    casting: str,
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, eps, activation, weight_offset, casting)
    return contiguous_like(x), contiguous_like(x)


_VALUES = "Tensor? weight, float eps, str? activation, float weight_offset, str casting"
_rms_norm = register(f"rms_norm(Tensor x, {_VALUES}) -> Tensor", _kernel, _fake, _check_inputs)
_rms_norm_residual = register(
    f"rms_norm_residual(Tensor x, Tensor residual, {_VALUES}) -> (Tensor, Tensor)",
    _kernel_residual,
    _fake_residual,
    _check,
)
_rms_norm_out = register(
    f"rms_norm_out(Tensor x, {_VALUES}, Tensor(a!) out) -> ()", _kernel_out, _check_out, _check_out
)
_rms_norm_residual_out = register(
    f"rms_norm_residual_out(Tensor x, Tensor residual, {_VALUES}, Tensor(a!) out, Tensor(b!) residual_out) -> ()",
    _kernel_residual_out,
    _check,
    _check,
)
