"""merge_attention_states: attention over two sets of keys from the attention over each."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import (
    any_requires_grad,
    check_like,
    check_tensor,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.kv_cache import uneven
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import check_output, contiguous_like

_OP = "merge_attention_states"
_UNFUSED = "torch.logaddexp and torch.exp"


class Desc(NamedTuple):
    """What a merge_attention_states kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    q_len: int
    num_heads: int
    head_dim: int
    aligned: bool
    """Pointers to results and their strides are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments whose last dimension is not contiguous: they are copied to or from contiguous memory."""

    def notes(self) -> tuple[str, ...]:
        notes = [f"'{name}' is not contiguous in its last dimension and is copied" for name in self.copied]
        if not self.aligned:
            notes.append("a pointer or a stride is not a multiple of 16 bytes: narrower memory accesses")
        return tuple(notes)


Strides = tuple[int, ...]
"""Distances in elements, [batch, q_len, heads] of out_a, out_b and out, then [batch, heads, q_len] of each lse."""


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of attention over the keys of both a and b, as if they had been attended to at once.

    Args:
        out_a: [batch, q_len, num_heads, head_dim], float32, bfloat16 or float16, any strides.
        lse_a: [batch, num_heads, q_len] float32, the natural logarithm of the softmax's denominator. A state with -inf
            is empty: its out_a is not looked at.
        out_b, lse_b: the other state, as out_a and lse_a.
        out, lse: where the results are written, together or not at all; may be exactly an input.

    Returns:
        (out, lse), as out_a and lse_a. Two empty states give zeros and -inf.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    if out is None and lse is None:
        return _merge(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]
    _merge_out(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse  # type: ignore[return-value]


def describe(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    outputs = () if out is None and lse is None else (out, lse)
    _check(out_a, lse_a, out_b, lse_b, *outputs)
    aligned = not any(t.data_ptr() & 15 for t in (out_a, out_b, out) if t is not None)
    return _desc((out_a, lse_a, out_b, lse_b, out, lse), aligned)


def _check(*tensors: Any) -> None:
    """Everything but overlaps of memory; six tensors with outputs, four without."""
    names = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")[: len(tensors)]
    named = dict(zip(names, tensors, strict=True))
    if not all(isinstance(t, Tensor) for t in tensors):
        raise_not_tensor(_OP, names, **named)
    if torch.is_grad_enabled() and any_requires_grad(*tensors):
        raise_requires_grad(_OP, _UNFUSED, **named)
    out_a = tensors[0]
    check_tensor(_OP, "out_a", out_a)
    if out_a.ndim != 4:
        raise ArgumentValueError(_OP, "out_a", "shape [batch, q_len, num_heads, head_dim]", list(out_a.shape))
    batch, q_len, heads, _ = out_a.shape
    for name, t in named.items():
        if name.startswith("out"):
            check_like(_OP, name, t, out_a, "out_a")
            continue
        if t.dtype != torch.float32:
            raise ArgumentTypeError(_OP, name, "float32", t.dtype)
        if t.shape != (batch, heads, q_len):
            expected = f"shape [{batch}, {heads}, {q_len}], [batch, num_heads, q_len] of out_a"
            raise ArgumentValueError(_OP, name, expected, list(t.shape))
        if t.device != out_a.device:
            raise ArgumentValueError(_OP, name, f"the device of out_a, {out_a.device}", t.device)


def _fresh(shape: torch.Size) -> tuple[int, int, int]:
    return (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])


def _strides(tensors: Tensors) -> Strides:
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    assert out_a is not None
    assert lse_a is not None
    assert out_b is not None
    assert lse_b is not None
    q_len, heads = out_a.shape[1:3]
    return (
        *out_a.stride()[:3],
        *out_b.stride()[:3],
        *(_fresh(out_a.shape) if out is None else out.stride()[:3]),
        *lse_a.stride(),
        *lse_b.stride(),
        *((heads * q_len, q_len, 1) if lse is None else lse.stride()),
    )


def _desc(tensors: Tensors, aligned: bool) -> Desc:
    out_a = tensors[0]
    assert out_a is not None
    copied = tuple(
        name
        for name, t in zip(("out_a", "out_b", "out"), (out_a, tensors[2], tensors[4]), strict=True)
        if t is not None and uneven(t)
    )
    bits = 0
    for stride in _strides(tensors)[:9]:
        bits |= stride * out_a.element_size()
    batch, q_len, heads, dim = out_a.shape
    return Desc(out_a.device, out_a.dtype, batch, q_len, heads, dim, aligned and not bits & 15, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    out_a, out_b, out, lse_a, lse_b, lse = tensors
    inputs = (out_a, lse_a, out_b, lse_b)
    _check(*inputs, *(() if out is None and lse is None else (out, lse)))
    assert out_a is not None
    if out_a.numel() == 0:
        return _empty
    desc = _desc((*inputs, out, lse), aligned)
    if desc.copied:
        return _run_on_copies
    return partial(dispatch.prepare(_OP, desc), _strides((*inputs, out, lse)))


_plans = Plans(_make_plan)


def _empty(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Without elements in the results there may still be an lse a row."""
    if lse.numel():
        torch.logaddexp(lse_a, lse_b, out=lse)


def _find(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any) -> Plan:
    return _plans.find((), (out_a, out_b, out), (lse_a, lse_b, lse))


def _run_on_copies(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """The slower path."""
    a, b, result = (t.contiguous() if uneven(t) else t for t in (out_a, out_b, out))
    _find(a, lse_a, b, lse_b, result, lse)(a, lse_a, b, lse_b, result, lse)
    if result is not out:
        out.copy_(result)


def _kernel(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    plan = _find(out_a, lse_a, out_b, lse_b, None, None)
    out, lse = contiguous_like(out_a), contiguous_like(lse_a)
    plan(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def _kernel_out(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    plan = _find(out_a, lse_a, out_b, lse_b, out, lse)
    inputs = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    check_output(_OP, "out", out, **inputs)
    check_output(_OP, "lse", lse, **inputs, out=out)
    plan(out_a, lse_a, out_b, lse_b, out, lse)


def _fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    return contiguous_like(out_a), contiguous_like(lse_a)


_merge = register(
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    _check,
)
_merge_out = register(
    "merge_attention_states_out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse)"
    " -> ()",
    _kernel_out,
    _check,
    _check,
)
