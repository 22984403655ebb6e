"""qk_norm_rope: the q and the k heads of a qkv buffer normalised and turned by their tokens' angles, in one kernel."""

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
from onepass.ops.rows import aligned_16, clearly_apart

_OP = "qk_norm_rope"
_UNFUSED = "split, torch.nn.functional.rms_norm and q * cos + rotate_half(q) * sin"


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm and rotary position embedding of every q and k head of a qkv buffer, in one kernel.

    Each head of q and of k becomes rope(x / sqrt(mean(x^2) + eps) * (weight + weight_offset)), as `rms_norm_rope`
    does it: in float32, rounded once. Qwen3 (weight_offset 0) and Gemma 3 (1) do this after their qkv projection.

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], q, then k, then v; float32, bfloat16 or float16,
            any stride between tokens. Where the last dimension is not contiguous it is copied first.
        q_weight: [head_dim], float32, bfloat16 or float16.
        k_weight: the same for k.
        cos_sin_cache: [max_position, rotary_dim] in float32, cosines then sines: see `apply_rope`.
        positions: [num_tokens], int32 or int64. All elements of q and of k of a token whose position is outside the
            table become NaN; v stays as it is.
        num_q_heads: heads of q.
        num_kv_heads: heads of k, and of v.
        head_dim: elements of a head.
        eps: added to the mean of squares.
        weight_offset: added to both weights.
        interleaved: pairs are elements side by side, not one of each half: see `apply_rope`.
        validate: raise an error for a position outside the table. This waits for the device, which a CUDA graph's
            capture does not allow.
        q_out: where q is written: [num_tokens, num_q_heads, head_dim], dtype of qkv; may be exactly q's part of qkv.
        k_out: the same for k, [num_tokens, num_kv_heads, head_dim].
        v_out: where v is copied, in the same kernel.

    Returns:
        q, k and v, each [num_tokens, heads, head_dim]. Without `v_out`, v is a view of qkv: nothing is moved.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or memory overlap is wrong, or with `validate` a position (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    sizes = (num_q_heads, num_kv_heads, head_dim)
    args = (qkv, q_weight, k_weight, cos_sin_cache, positions, *sizes, eps, weight_offset, interleaved, validate)
    if q_out is None and k_out is None and v_out is None:
        q_out, k_out = cast(tuple[Tensor, Tensor], _qk_norm_rope(*args))
    else:
        if q_out is None or k_out is None:
            if not torch.compiler.is_compiling():
                _check(*args, q_out, k_out, v_out)  # the sizes of what is allocated are right
            q_out = _fresh(qkv, num_q_heads, head_dim) if q_out is None else q_out
            k_out = _fresh(qkv, num_kv_heads, head_dim) if k_out is None else k_out
        _qk_norm_rope_out(*args, q_out, k_out, v_out)
    if v_out is None:
        v_out = qkv[:, (num_q_heads + num_kv_heads) * head_dim :].unflatten(1, (num_kv_heads, head_dim))
    return cast(tuple[Tensor, Tensor, Tensor], (q_out, k_out, v_out))


def describe(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    sizes = (num_q_heads, num_kv_heads, head_dim)
    outputs = (q_out, k_out, v_out)
    inputs = (qkv, q_weight, k_weight, cos_sin_cache, positions)
    _check(*inputs, *sizes, eps, weight_offset, interleaved, validate, *outputs)
    names = ("qkv", "q_weight", "k_weight", "cos_sin_cache", "q_out", "k_out", "v_out")
    tensors = dict(zip(names, (*inputs[:4], *outputs), strict=True))
    copied = tuple(name for name, t in tensors.items() if needs_copy(t))
    aligned = aligned_16(*(t for name, t in tensors.items() if name not in copied))
    heads = _heads(dense(qkv), sizes, outputs)
    aligned = aligned and aligned_16(heads.k, heads.v)
    return plan_call(heads, (q_weight, k_weight), cos_sin_cache, positions, interleaved, aligned, copied)[0]


def _check(
    qkv: Any,
    q_weight: Any,
    k_weight: Any,
    cos_sin_cache: Any,
    positions: Any,
    num_q_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    eps: Any,
    weight_offset: Any,
    interleaved: Any,
    validate: Any,
    q_out: Any = None,
    k_out: Any = None,
    v_out: Any = None,
) -> None:
    """Everything but overlaps of memory and positions."""
    inputs = {
        "qkv": qkv,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "cos_sin_cache": cos_sin_cache,
        "positions": positions,
    }
    tensors = {**inputs, "q_out": q_out, "k_out": k_out, "v_out": v_out}
    if not all(isinstance(t, Tensor if n in inputs else OPTIONAL_TENSOR) for n, t in tensors.items()):
        raise_not_tensor(_OP, tuple(inputs), **tensors)
    for name, size in (("num_q_heads", num_q_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            raise ArgumentTypeError(_OP, name, "an int", type(size).__name__)
        if size < 0:
            raise ArgumentValueError(_OP, name, "a number from 0 on", size)
    check_number(_OP, "eps", eps)
    check_number(_OP, "weight_offset", weight_offset)
    check_flag(_OP, "interleaved", interleaved)
    check_flag(_OP, "validate", validate)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(_OP, _UNFUSED, **tensors)
    check_tensor(_OP, "qkv", qkv)
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    if qkv.ndim != 2 or qkv.shape[1] != width:
        expected = f"shape [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim = {width}]"
        raise ArgumentValueError(_OP, "qkv", expected, list(qkv.shape))
    for name in ("q_weight", "k_weight"):
        check_tensor(_OP, name, inputs[name])
        check_weight(_OP, name, inputs[name], head_dim, qkv, "qkv")
    check_table(_OP, cos_sin_cache, positions, qkv, "qkv", head_dim)
    for name, out, heads in (
        ("q_out", q_out, num_q_heads),
        ("k_out", k_out, num_kv_heads),
        ("v_out", v_out, num_kv_heads),
    ):
        if out is not None:
            check_out_heads(_OP, name, out, (qkv.shape[0], heads, head_dim), qkv, "qkv")


def _heads(qkv: Tensor, sizes: tuple[int, int, int], outputs: tuple[Tensor | None, ...] = ()) -> Heads:
    """The heads of a qkv whose last dimension is contiguous; v only where it is copied."""
    num_q_heads, num_kv_heads, head_dim = sizes
    num_tokens, step, first = qkv.shape[0], qkv.stride(0), qkv.storage_offset()
    kv_shape, strides = (num_tokens, num_kv_heads, head_dim), (step, head_dim, 1)
    q_out, k_out, v_out = outputs or (None, None, None)
    q = qkv.as_strided((num_tokens, num_q_heads, head_dim), strides, first)
    k = qkv.as_strided(kv_shape, strides, first + num_q_heads * head_dim)
    v = None
    if v_out is not None:
        v = qkv.as_strided(kv_shape, strides, first + (num_q_heads + num_kv_heads) * head_dim)
    return Heads(q, k, v, q_out, k_out, v_out)


def _fresh(qkv: Tensor, num_heads: int, head_dim: int) -> Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim))


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    num_q_heads, num_kv_heads, head_dim, eps, weight_offset, interleaved, validate = values
    qkv, q_weight, k_weight, cache, positions, *outputs = tensors
    inputs, sizes = (qkv, q_weight, k_weight, cache, positions), (num_q_heads, num_kv_heads, head_dim)
    _check(*inputs, *sizes, eps, weight_offset, interleaved, validate, *outputs)
    assert qkv is not None
    assert cache is not None
    assert positions is not None
    if qkv.numel() == 0:
        return lambda *args: None
    if any(needs_copy(t) for t in (qkv, q_weight, k_weight, cache, *outputs)):
        return partial(_run_on_copies, values)
    heads = _heads(qkv, sizes, tuple(outputs))
    # q starts where qkv does; k and v start within the first token.
    for start in (num_q_heads, num_q_heads + num_kv_heads):
        aligned = aligned and start * head_dim * qkv.element_size() % 16 == 0
    desc, strides = plan_call(heads, (q_weight, k_weight), cache, positions, interleaved, aligned)
    run = dispatch.prepare(_OP, desc)

    def plan(
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cache: Tensor,
        positions: Tensor,
        q_out: Tensor,
        k_out: Tensor,
        v_out: Tensor | None,
    ) -> None:
        q, k, v, *outputs = _heads(qkv, sizes, (q_out, k_out, v_out))
        run(strides, eps, weight_offset, q, k, v, q_weight, k_weight, cache, positions, *outputs)

    return plan


_plans = Plans(_make_plan)


def _run_on_copies(
    values: tuple[Any, ...],
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cache: Tensor,
    positions: Tensor,
    *outputs: Tensor | None,
) -> None:
    """The slower path of rows.py."""
    rows = tuple(None if out is None else dense_output(out) for out in outputs)
    inputs = (*(dense(t) for t in (qkv, q_weight, k_weight, cache)), positions)
    _plans.find(values, (*inputs, *rows))(*inputs, *rows)
    copy_back(outputs, rows)


def _kernel(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    values = (num_q_heads, num_kv_heads, head_dim, eps, weight_offset, interleaved, validate)
    inputs = (qkv, q_weight, k_weight, cos_sin_cache, positions)
    plan = _plans.find(values, inputs)
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    q_out, k_out = _fresh(qkv, num_q_heads, head_dim), _fresh(qkv, num_kv_heads, head_dim)
    plan(*inputs, q_out, k_out, None)
    return q_out, k_out


def _kernel_out(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
) -> None:
    values = (num_q_heads, num_kv_heads, head_dim, eps, weight_offset, interleaved, validate)
    inputs = (qkv, q_weight, k_weight, cos_sin_cache, positions)
    plan = _plans.find(values, (*inputs, q_out, k_out, v_out))
    if validate:
        check_positions(_OP, cos_sin_cache, positions)
    _check_memory(qkv, (num_q_heads, num_kv_heads, head_dim), inputs[1:], q_out, k_out, v_out)
    plan(*inputs, q_out, k_out, v_out)


def _check_memory(
    qkv: Tensor,
    sizes: tuple[int, int, int],
    others: tuple[Tensor, ...],
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
) -> None:
    """Each output lies on its own part of qkv, or apart from all of it."""
    outputs = {"q_out": q_out, "k_out": k_out}
    if v_out is not None:
        outputs["v_out"] = v_out
    if clearly_apart(tuple(outputs.values()), (qkv, *others)):
        return
    num_q_heads, num_kv_heads, head_dim = sizes
    parts = qkv.split((num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim), dim=1)
    counts = (num_q_heads, num_kv_heads, num_kv_heads)
    sources = {
        name: part.unflatten(1, (heads, head_dim))
        for name, part, heads in zip(("q of qkv", "k of qkv", "v of qkv"), parts, counts, strict=True)
    }
    names = ("q_weight", "k_weight", "cos_sin_cache", "positions")
    check_outputs(_OP, outputs, sources, dict(zip(names, others, strict=True)))


def _fake(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    sizes = (num_q_heads, num_kv_heads, head_dim)
    _check(qkv, q_weight, k_weight, cos_sin_cache, positions, *sizes, eps, weight_offset, interleaved, validate)
    return _fresh(qkv, num_q_heads, head_dim), _fresh(qkv, num_kv_heads, head_dim)


_ARGUMENTS = (
    "Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, Tensor positions, int num_q_heads,"
    " int num_kv_heads, int head_dim, float eps, float weight_offset, bool interleaved, bool validate"
)
_qk_norm_rope = register(f"qk_norm_rope({_ARGUMENTS}) -> (Tensor, Tensor)", _kernel, _fake, _check)
_qk_norm_rope_out = register(
    f"qk_norm_rope_out({_ARGUMENTS}, Tensor(a!) q_out, Tensor(b!) k_out, Tensor(c!)? v_out) -> ()",
    _kernel_out,
    _check,
    _check,
)
