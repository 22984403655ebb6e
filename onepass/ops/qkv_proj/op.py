"""qkv_proj: the QKV projection with the RMSNorm before it and bias, q/k norm, RoPE and the cache append after it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.qkv_proj.arguments import CACHES, INDICES, INPUTS, OUTPUTS, check
from onepass.ops.registration import register
from onepass.ops.rope_call import check_flag, check_positions, copy_back, dense, dense_output, needs_copy
from onepass.ops.rows import aligned_16, check_outputs, copy_notes

FEW_TOKENS = 16
"""Up to so many tokens a call is bound by the weights, and all of it happens in one kernel."""


class Desc(NamedTuple):
    """What a qkv_proj kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    norm_weight_dtype: torch.dtype | None
    q_norm_dtype: torch.dtype | None
    k_norm_dtype: torch.dtype | None
    position_dtype: torch.dtype | None
    num_tokens: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """0: no RoPE."""
    interleaved: bool
    has_offset: bool
    """Norm weights are weight + offset."""
    has_cache: bool
    dense_heads: bool
    """In every output the heads of a token lie one after the other."""
    aligned: bool
    """Every pointer but the indices', and every stride but the last, is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments whose last dimension is not contiguous: they take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class Call(NamedTuple):
    """The numbers of a call: constants of the norms, sizes, and strides in elements, 0 where there is no tensor."""

    norm_eps: float
    norm_weight_offset: float
    qk_norm_eps: float
    num_positions: int
    page_size: int
    num_slots: int
    x: int
    w: int
    cos_sin: int
    positions: int
    slots: int
    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    key_page: int
    key_slot: int
    key_head: int
    value_page: int
    value_slot: int
    value_head: int


def qkv_proj(
    x: Tensor,
    w_qkv: Tensor,
    bias: Tensor | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float = 1e-6,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one attention layer: RMSNorm, projection, bias, q/k RMSNorm, RoPE and the append to a paged cache.

    qkv = linear(rms_norm(x), w_qkv, bias); the heads of q, then of k, then of v. Heads of q and k are then normed over
    head_dim (Qwen3) and rotated, each step only where its tensors are given. Products are summed in float32, and q, k
    and v are rounded once where one kernel does it all (up to 16 tokens, without q/k norm). A token whose position is
    outside the table gets NaN for q and k; v is untouched. A token whose slot is -1 or past the cache is not appended,
    and its results are the same as any other's.

    A token's bits do not depend on the other tokens within one class of num_tokens: 1 and 2 to 16. Above 16 the product
    is torch's own matrix product, whose order of summation depends on num_tokens.

    Args:
        x: [num_tokens, hidden_size], float32, bfloat16 or float16; rows may be apart.
        w_qkv: [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size] in x's dtype, as torch.nn.Linear has it.
        bias: [(num_q_heads + 2 * num_kv_heads) * head_dim], any float dtype (Qwen2), or None.
        num_q_heads: heads of q.
        num_kv_heads: heads of k and of v; any number, also one that does not divide num_q_heads.
        head_dim: elements of a head.
        norm_weight: [hidden_size], any float dtype: x is normed first. None: x is taken as it is.
        norm_eps: added to the mean square of x, inside the root.
        norm_weight_offset: added to norm_weight, q_norm_weight and k_norm_weight (Gemma: 1.0).
        q_norm_weight: [head_dim], any float dtype; only with k_norm_weight.
        k_norm_weight: [head_dim], any float dtype; only with q_norm_weight.
        qk_norm_eps: added to the mean square of a head, inside the root.
        cos_sin_cache: [max_position, rotary_dim] float32, cosines then sines of rotary_dim / 2 angles; only with
            positions. The first rotary_dim elements of a head are rotated.
        positions: [num_tokens], int32 or int64.
        interleaved: pairs are elements 2i and 2i + 1 (GPT-J), not i and i + rotary_dim / 2 (Llama).
        key_cache: [num_pages, page_size, num_kv_heads, head_dim] in x's dtype, the last dimension contiguous: the
            rotated k is written into it; only with value_cache and slot_mapping.
        value_cache: the same for v.
        slot_mapping: [num_tokens] int64: page * page_size + offset in the page. Of two tokens with one slot either is
            kept.
        validate: raise where a position is outside the table; waits for the device.
        q_out, k_out, v_out: where results are written: shape and dtype of q, k and v, memory apart from all the rest.

    Returns:
        q [num_tokens, num_q_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], in x's dtype.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, layout or memory overlap is wrong, or one of several tensors that go
            together is missing, or with validate=True a position (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Su et al., "RoFormer", 2021; the paged
    cache is that of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    2023.
    """
    check_flag("qkv_proj", "validate", validate)
    tensors = (x, w_qkv, bias, norm_weight, q_norm_weight, k_norm_weight, cos_sin_cache)
    tail = (key_cache, value_cache, positions, slot_mapping)
    numbers = (num_q_heads, num_kv_heads, head_dim, norm_eps, norm_weight_offset, qk_norm_eps, interleaved)
    if validate:
        check(*tensors, *tail, *numbers, q_out, k_out, v_out)
        if cos_sin_cache is not None and positions is not None:
            check_positions("qkv_proj", cos_sin_cache, positions)
    if q_out is None and k_out is None and v_out is None:
        return _qkv_proj(*tensors, *tail, *numbers)  # type: ignore[no-any-return]
    if q_out is None or k_out is None or v_out is None:
        check(*tensors, *tail, *numbers, q_out, k_out, v_out)
        fresh = _fresh(x, num_q_heads, num_kv_heads, head_dim)
        given = (q_out, k_out, v_out)
        q_out, k_out, v_out = (f if out is None else out for f, out in zip(fresh, given, strict=True))
    _qkv_proj_out(*tensors, *tail, *numbers, q_out, k_out, v_out)
    return q_out, k_out, v_out


def describe(
    x: Tensor,
    w_qkv: Tensor,
    bias: Tensor | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float = 1e-6,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    validate: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    inputs = (x, w_qkv, bias, norm_weight, q_norm_weight, k_norm_weight, cos_sin_cache, key_cache, value_cache)
    numbers = (num_q_heads, num_kv_heads, head_dim, norm_eps, norm_weight_offset, qk_norm_eps, interleaved)
    outputs = (q_out, k_out, v_out)
    check(*inputs, positions, slot_mapping, *numbers, *outputs)
    names = (*INPUTS, *CACHES, *OUTPUTS)
    copied = tuple(name for name, t in zip(names, (*inputs, *outputs), strict=True) if needs_copy(t))
    in_place = [t for t in (*inputs, *outputs) if not needs_copy(t)]
    return _plan_call((*inputs, positions, slot_mapping, *outputs), numbers, aligned_16(*in_place), copied)[0]


def _plan_call(
    tensors: Tensors, numbers: tuple[Any, ...], aligned: bool, copied: tuple[str, ...] = ()
) -> tuple[Desc, Call]:
    """What a kernel is chosen by, and the numbers it gets. An output of None is fresh."""
    x, w, bias, norm_weight, q_norm, k_norm, table, key_cache, value_cache, positions, slots, *outputs = tensors
    num_q_heads, num_kv_heads, head_dim, norm_eps, offset, qk_norm_eps, interleaved = numbers
    assert x is not None
    assert w is not None
    heads: list[int] = []
    for out, count in zip(outputs, (num_q_heads, num_kv_heads, num_kv_heads), strict=True):
        if out is None or needs_copy(out):
            heads += (count * head_dim, head_dim)
        else:
            heads += (_stride(out, 0), _stride(out, 1))
    cached: list[int] = []
    for cache in (key_cache, value_cache):
        cached += (0, 0, 0) if cache is None else (_stride(cache, 0), _stride(cache, 1), _stride(cache, 2))
    rows = [t.shape[1] if needs_copy(t) else _stride(t, 0) for t in (x, w)]
    table_row = 0 if table is None else table.shape[1] if needs_copy(table) else _stride(table, 0)
    sizes = (
        0 if table is None else table.shape[0],
        1 if key_cache is None else key_cache.shape[1],
        0 if key_cache is None else key_cache.shape[0] * key_cache.shape[1],
    )
    indices = [0 if t is None else _stride(t, 0) for t in (positions, slots)]
    constants = (float(norm_eps), float(offset), float(qk_norm_eps))
    call = Call._make((*constants, *sizes, *rows, table_row, *indices, *heads, *cached))
    elements = 0
    for distance in (*rows, *heads, *cached):
        elements |= distance
    desc = Desc(
        x.device,
        x.dtype,
        _dtype(bias),
        _dtype(norm_weight),
        _dtype(q_norm),
        _dtype(k_norm),
        _dtype(positions),
        x.shape[0],
        x.shape[1],
        num_q_heads,
        num_kv_heads,
        head_dim,
        0 if table is None else table.shape[1],
        interleaved,
        bool(offset),
        key_cache is not None,
        all(stride in (0, head_dim) for stride in heads[1::2]),
        aligned and not (elements * x.element_size() | table_row * 4) & 15,
        copied,
    )
    return desc, call


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _stride(t: Tensor, dim: int) -> int:
    """0 where the dimension has at most one element: its stride then says nothing."""
    return t.stride(dim) if t.shape[dim] > 1 else 0


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    numbers, has_outputs = values[:-1], values[-1]
    *most, positions, slots = tensors
    outputs = tuple(most[9:]) if has_outputs else (None,) * 3
    inputs = most[:9]
    check(*(*inputs, positions, slots, *numbers, *outputs))
    x = inputs[0]
    assert x is not None
    if x.shape[0] == 0:
        return lambda *args: None
    if any(needs_copy(t) for t in (*inputs, *outputs)):
        return partial(_run_on_copies, values)
    desc, call = _plan_call((*inputs, positions, slots, *outputs), numbers, aligned)
    return partial(dispatch.prepare("qkv_proj", desc), call)


_plans = Plans(_make_plan)


def _run_on_copies(values: tuple[Any, ...], *tensors: Tensor | None) -> None:
    """The slower path of rows.py."""
    inputs = tuple(None if t is None else dense(t) for t in tensors[:11])
    outputs = [t for t in tensors[11:] if t is not None]
    rows = [dense_output(t) for t in outputs]
    _plans.find((*values[:-1], True), (*inputs[:9], *rows), inputs[9:])(*inputs, *rows)
    copy_back(outputs, rows)


def _fresh(x: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = x.shape[0]
    return (
        x.new_empty((num_tokens, num_q_heads, head_dim)),
        x.new_empty((num_tokens, num_kv_heads, head_dim)),
        x.new_empty((num_tokens, num_kv_heads, head_dim)),
    )


def _kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    numbers = args[11:]
    plan = _plans.find((*numbers, False), args[:9], args[9:11])
    if args[7] is not None:
        inputs = zip((*INPUTS, *INDICES), (*args[:7], *args[9:11]), strict=True)
        check_outputs("qkv_proj", {"key_cache": args[7], "value_cache": args[8]}, **dict(inputs))
    q, k, v = _fresh(args[0], *numbers[:3])
    plan(*args[:11], q, k, v)
    return q, k, v


def _kernel_out(*args: Any) -> None:
    numbers, outputs = args[11:18], args[18:]
    plan = _plans.find((*numbers, True), (*args[:9], *outputs), args[9:11])
    inputs = zip((*INPUTS, *INDICES), (*args[:7], *args[9:11]), strict=True)
    written = {name: t for name, t in zip((*CACHES, *OUTPUTS), (*args[7:9], *outputs), strict=True) if t is not None}
    check_outputs("qkv_proj", written, **dict(inputs))
    plan(*args[:11], *outputs)


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    check(*args)
    return _fresh(args[0], *args[11:14])


_ARGUMENTS = (
    "Tensor x, Tensor w_qkv, Tensor? bias, Tensor? norm_weight, Tensor? q_norm_weight, Tensor? k_norm_weight,"
    " Tensor? cos_sin_cache, Tensor(a!)? key_cache, Tensor(b!)? value_cache, Tensor? positions, Tensor? slot_mapping,"
    " int num_q_heads, int num_kv_heads, int head_dim, float norm_eps, float norm_weight_offset, float qk_norm_eps,"
    " bool interleaved"
)
_qkv_proj = register(f"qkv_proj({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _kernel, _fake, check)
_qkv_proj_out = register(
    f"qkv_proj_out({_ARGUMENTS}, Tensor(c!) q_out, Tensor(d!) k_out, Tensor(e!) v_out) -> ()",
    _kernel_out,
    check,
    check,
)
