"""apply_rope: the heads of q and of k turned by their tokens' angles, in one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import OPTIONAL_TENSOR, any_requires_grad, check_tensor, raise_not_tensor, raise_requires_grad
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rope_call import (
    Desc,
    Heads,
    check_flag,
    check_heads,
    check_out_heads,
    check_outputs,
    check_positions,
    check_table,
    copy_back,
    dense,
    dense_output,
    needs_copy,
    plan_call,
)
from onepass.ops.rows import aligned_16, contiguous_like

_OP = "apply_rope"
_UNFUSED = "q * cos + rotate_half(q) * sin, and the same of k"


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k (Su et al., 2021) in one kernel, in float32 and rounded once.

    With r = rotary_dim / 2 and r cosines c and sines s: the halves a = x[..., :r] and b = x[..., r : 2 * r] of a head
    become a * c - b * s and b * c + a * s, as in Llama and GPT-NeoX. Interleaved, a and b are its elements with even
    and with odd index, as in GPT-J. Elements from rotary_dim on stay.

    Args:
        q: [num_tokens, num_q_heads, head_dim], float32, bfloat16 or float16; any strides between tokens and heads, so a
            slice of a qkv buffer is not copied. Where the last dimension is not contiguous it is copied first.
        k: [num_tokens, num_kv_heads, head_dim], dtype and device of q.
        cos_sin_cache: [max_position, rotary_dim] in float32: the cosines of each position, then its sines. rotary_dim
            is even and may be smaller than head_dim.
        positions: [num_tokens], int32 or int64. All elements of a token whose position is outside the table become NaN.
        interleaved: which elements make a pair.
        validate: raise an error for a position outside the table. This waits for the device, which a CUDA graph's
            capture does not allow.
        q_out: where the result for q is written: shape and dtype of q; may be exactly q.
        k_out: the same for k.

    Returns:
        q and k turned, in their shapes and dtype.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong, or with `validate` a position (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    if q_out is None and k_out is None:
        return cast(tuple[Tensor, Tensor], _apply_rope(q, k, cos_sin_cache, positions, interleaved, validate))
    if q_out is None or k_out is None:
        # A wrong q or k is named below, with the output that is there.
        q_out = contiguous_like(q) if q_out is None and isinstance(q, Tensor) else q_out
        k_out = contiguous_like(k) if k_out is None and isinstance(k, Tensor) else k_out
    _apply_rope_out(q, k, cos_sin_cache, positions, interleaved, validate, q_out, k_out)
    return cast(tuple[Tensor, Tensor], (q_out, k_out))


def describe(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(q, k, cos_sin_cache, positions, interleaved, validate, q_out, k_out)
    tensors = {"q": q, "k": k, "cos_sin_cache": cos_sin_cache, "q_out": q_out, "k_out": k_out}
    copied = tuple(name for name, t in tensors.items() if needs_copy(t))
    aligned = aligned_16(*(t for name, t in tensors.items() if name not in copied))
    heads = Heads(q, k, None, q_out, k_out, None)
    return plan_call(heads, (None, None), cos_sin_cache, positions, interleaved, aligned, copied)[0]


def _check(
    q: Any,
    k: Any,
    cos_sin_cache: Any,
    positions: Any,
    interleaved: Any,
    validate: Any,
    q_out: Any = None,
    k_out: Any = None,
) -> None:
    """Everything but overlaps of memory and positions."""
    tensors = {
        "q": q,
        "k": k,
        "cos_sin_cache": cos_sin_cache,
        "positions": positions,
        "q_out": q_out,
        "k_out": k_out,
    }
    required = ("q", "k", "cos_sin_cache", "positions")
    if not all(isinstance(t, Tensor if n in required else OPTIONAL_TENSOR) for n, t in tensors.items()):
        raise_not_tensor(_OP, required, **tensors)
    check_flag(_OP, "interleaved", interleaved)
    check_flag(_OP, "validate", validate)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(_OP, _UNFUSED, **tensors)
    check_tensor(_OP, "q", q)
    check_heads(_OP, "q", q)
    if k.dtype != q.dtype:
        raise ArgumentTypeError(_OP, "k", f"the dtype of q, {q.dtype}", k.dtype)
    if k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        expected = f"shape [{q.shape[0]}, num_kv_heads, {q.shape[2]}], as q has it"
        raise ArgumentValueError(_OP, "k", expected, list(k.shape))
    if k.device != q.device:
        raise ArgumentValueError(_OP, "k", f"the device of q, {q.device}", k.device)
    check_table(_OP, cos_sin_cache, positions, q, "q", q.shape[2])
    for name, out, source, source_name in (("q_out", q_out, q, "q"), ("k_out", k_out, k, "k")):
        if out is not None:
            check_out_heads(_OP, name, out, source.shape, source, source_name)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    interleaved, validate = values
    q, k, cache, positions, *outputs = tensors
    _check(q, k, cache, positions, interleaved, validate, *outputs)
    assert q is not None
    assert k is not None
    assert cache is not None
    assert positions is not None
    if q.numel() == 0 and k.numel() == 0:
        return lambda *args: None
    if any(needs_copy(t) for t in (q, k, cache, *outputs)):
        return partial(_run_on_copies, values)
    q_out, k_out = outputs or (None, None)
    heads = Heads(q, k, None, q_out, k_out, None)
    desc, strides = plan_call(heads, (None, None), cache, positions, interleaved, aligned)
    run = dispatch.prepare(_OP, desc)

    def plan(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, q_out: Tensor, k_out: Tensor) -> None:
        run(strides, 0.0, 0.0, q, k, None, None, None, cache, positions, q_out, k_out, None)

    return plan


_plans = Plans(_make_plan)


def _run_on_copies(
    values: tuple[Any, ...], q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, q_out: Tensor, k_out: Tensor
) -> None:
    """The slower path of rows.py."""
    rows = dense_output(q_out), dense_output(k_out)
    inputs = dense(q), dense(k), dense(cache), positions
    _plans.find(values, (*inputs, *rows))(*inputs, *rows)
    copy_back((q_out, k_out), rows)


def _kernel(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool, validate: bool
) -> tuple[Tensor, Tensor]:
    plan = _plans.find((interleaved, validate), (q, k, cos_sin_cache, positions))
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    q_out, k_out = contiguous_like(q), contiguous_like(k)
    plan(q, k, cos_sin_cache, positions, q_out, k_out)
    return q_out, k_out


def _kernel_out(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    validate: bool,
    q_out: Tensor,
    k_out: Tensor,
) -> None:
    plan = _plans.find((interleaved, validate), (q, k, cos_sin_cache, positions, q_out, k_out))
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    others = {"cos_sin_cache": cos_sin_cache, "positions": positions}
    check_outputs(_OP, {"q_out": q_out, "k_out": k_out}, {"q": q, "k": k}, others)
    plan(q, k, cos_sin_cache, positions, q_out, k_out)


def _fake(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, interleaved: bool, validate: bool
) -> tuple[Tensor, Tensor]:
    _check(q, k, cos_sin_cache, positions, interleaved, validate)
    return contiguous_like(q), contiguous_like(k)


_apply_rope = register(
    "apply_rope(Tensor q, Tensor k, Tensor cos_sin_cache, Tensor positions, bool interleaved, bool validate)"
    " -> (Tensor, Tensor)",
    _kernel,
    _fake,
    _check,
)
_apply_rope_out = register(
    "apply_rope_out(Tensor q, Tensor k, Tensor cos_sin_cache, Tensor positions, bool interleaved, bool validate,"
    " Tensor(a!) q_out, Tensor(b!) k_out) -> ()",
    _kernel_out,
    _check,
    _check,
)
