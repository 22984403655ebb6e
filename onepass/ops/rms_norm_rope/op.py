"""rms_norm_rope: each head of x normalised and turned by its token's angles, in one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from onepass import dispatch
from onepass.ops.checks import OPTIONAL_TENSOR, any_requires_grad, check_tensor, raise_not_tensor, raise_requires_grad
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rope_call import (
    Desc,
    Heads,
    check_flag,
    check_heads,
    check_number,
    check_out_heads,
    check_outputs,
    check_positions,
    check_table,
    check_weight,
    copy_back,
    dense,
    dense_output,
    needs_copy,
    plan_call,
)
from onepass.ops.rows import aligned_16, contiguous_like

_OP = "rms_norm_rope"
_UNFUSED = "torch.nn.functional.rms_norm followed by q * cos + rotate_half(q) * sin"


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of each head (Zhang and Sennrich, 2019), then rotary position embedding (Su et al., 2021), in one kernel.

    rope(x / sqrt(mean(x^2) + eps) * (weight + weight_offset)), the mean over head_dim: what Qwen3 does with q and k;
    weight_offset is 1 for Gemma 3. All of it is in float32 and rounded once. Models round between the norm and the
    rotation as well, but only because two kernels make them.

    Args:
        x: [num_tokens, heads, head_dim], float32, bfloat16 or float16; any strides between tokens and heads. Where the
            last dimension is not contiguous it is copied first.
        weight: [head_dim], any of these dtypes.
        cos_sin_cache: [max_position, rotary_dim] in float32, cosines then sines: see `apply_rope`.
        positions: [num_tokens], int32 or int64. All elements of a token whose position is outside the table become NaN.
        eps: added to the mean of squares.
        weight_offset: added to the weight.
        interleaved: pairs are elements side by side, not one of each half: see `apply_rope`.
        validate: raise an error for a position outside the table. This waits for the device, which a CUDA graph's
            capture does not allow.
        out: where the result is written: shape and dtype of x; may be exactly x.

    Returns:
        The heads normalised and turned, shape and dtype of x.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong, or with `validate` a position (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    args = (x, weight, cos_sin_cache, positions, eps, weight_offset, interleaved, validate)
    if out is None:
        return cast(Tensor, _rms_norm_rope(*args))
    _rms_norm_rope_out(*args, out)
    return out


def describe(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    validate: bool = False,
    out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(x, weight, cos_sin_cache, positions, eps, weight_offset, interleaved, validate, out)
    tensors = {"x": x, "weight": weight, "cos_sin_cache": cos_sin_cache, "out": out}
    copied = tuple(name for name, t in tensors.items() if needs_copy(t))
    aligned = aligned_16(*(t for name, t in tensors.items() if name not in copied))
    heads = Heads(x, None, None, out, None, None)
    return plan_call(heads, (weight, None), cos_sin_cache, positions, interleaved, aligned, copied)[0]


def _check(
    x: Any,
    weight: Any,
    cos_sin_cache: Any,
    positions: Any,
    eps: Any,
    weight_offset: Any,
    interleaved: Any,
    validate: Any,
    out: Any = None,
) -> None:
    """Everything but overlaps of memory and positions."""
    tensors = {"x": x, "weight": weight, "cos_sin_cache": cos_sin_cache, "positions": positions, "out": out}
    required = ("x", "weight", "cos_sin_cache", "positions")
    if not all(isinstance(t, Tensor if n in required else OPTIONAL_TENSOR) for n, t in tensors.items()):
        raise_not_tensor(_OP, required, **tensors)
    check_number(_OP, "eps", eps)
    check_number(_OP, "weight_offset", weight_offset)
    check_flag(_OP, "interleaved", interleaved)
    check_flag(_OP, "validate", validate)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(_OP, _UNFUSED, **tensors)
    check_tensor(_OP, "x", x)
    check_heads(_OP, "x", x)
    check_tensor(_OP, "weight", weight)
    check_weight(_OP, "weight", weight, x.shape[2], x, "x")
    check_table(_OP, cos_sin_cache, positions, x, "x", x.shape[2])
    if out is not None:
        check_out_heads(_OP, "out", out, x.shape, x, "x")


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    eps, weight_offset, interleaved, validate = values
    x, weight, cache, positions, *outputs = tensors
    _check(x, weight, cache, positions, eps, weight_offset, interleaved, validate, *outputs)
    assert x is not None
    assert cache is not None
    assert positions is not None
    if x.numel() == 0:
        return lambda *args: None
    if any(needs_copy(t) for t in (x, weight, cache, *outputs)):
        return partial(_run_on_copies, values)
    heads = Heads(x, None, None, outputs[0] if outputs else None, None, None)
    desc, strides = plan_call(heads, (weight, None), cache, positions, interleaved, aligned)
    run = dispatch.prepare(_OP, desc)

    def plan(x: Tensor, weight: Tensor, cache: Tensor, positions: Tensor, out: Tensor) -> None:
        run(strides, eps, weight_offset, x, None, None, weight, None, cache, positions, out, None, None)

    return plan


_plans = Plans(_make_plan)


def _run_on_copies(
    values: tuple[Any, ...], x: Tensor, weight: Tensor, cache: Tensor, positions: Tensor, out: Tensor
) -> None:
    """The slower path of rows.py."""
    rows = dense_output(out)
    inputs = dense(x), dense(weight), dense(cache), positions
    _plans.find(values, (*inputs, rows))(*inputs, rows)
    copy_back((out,), (rows,))


def _kernel(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
) -> Tensor:
    plan = _plans.find((eps, weight_offset, interleaved, validate), (x, weight, cos_sin_cache, positions))
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    out = contiguous_like(x)
    plan(x, weight, cos_sin_cache, positions, out)
    return out


def _kernel_out(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
    out: Tensor,
) -> None:
    plan = _plans.find((eps, weight_offset, interleaved, validate), (x, weight, cos_sin_cache, positions, out))
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    others = {"weight": weight, "cos_sin_cache": cos_sin_cache, "positions": positions}
    check_outputs(_OP, {"out": out}, {"x": x}, others)
    plan(x, weight, cos_sin_cache, positions, out)


def _fake(
    x: Tensor,
    weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
) -> Tensor:
    _check(x, weight, cos_sin_cache, positions, eps, weight_offset, interleaved, validate)
    return contiguous_like(x)


_rms_norm_rope = register(
    "rms_norm_rope(Tensor x, Tensor weight, Tensor cos_sin_cache, Tensor positions, float eps, float weight_offset,"
    " bool interleaved, bool validate) -> Tensor",
    _kernel,
    _fake,
    _check,
)
_rms_norm_rope_out = register(
    "rms_norm_rope_out(Tensor x, Tensor weight, Tensor cos_sin_cache, Tensor positions, float eps,"
    " float weight_offset, bool interleaved, bool validate, Tensor(a!) out) -> ()",
    _kernel_out,
    _check,
    _check,
)
