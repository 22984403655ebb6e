"""paged_attention: attention of new tokens over a paged cache of keys and values, split over the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from onepass.ops.kv_cache import check_caches, check_scales, nhd_shape, nhd_strides, uneven
from onepass.ops.paged_attention.config import partial_elements
from onepass.ops.plans import Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import check_output, contiguous_like

_OP = "paged_attention"
_UNFUSED = "torch.nn.functional.scaled_dot_product_attention over the gathered pages"
_LOG2_E = 1.0 / math.log(2.0)


class Desc(NamedTuple):
    """What a paged_attention kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    sinks_dtype: torch.dtype | None
    batch: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    max_pages: int
    """Columns of the block table."""
    causal: bool
    window: bool
    softcap: bool
    return_lse: bool
    aligned: bool
    """Pointers and strides are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments whose last dimension is not contiguous: they are copied first, whole caches too."""

    @property
    def group(self) -> int:
        """q heads of a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """The longest sequence that the block table has room for."""
        return self.max_pages * self.page_size

    def notes(self) -> tuple[str, ...]:
        notes = [f"'{name}' is not contiguous in its last dimension and is copied" for name in self.copied]
        if not self.aligned:
            notes.append("a pointer or a stride is not a multiple of 16 bytes: narrower memory accesses")
        return tuple(notes)


class Strides(NamedTuple):
    """Distances in elements."""

    q_batch: int
    q_token: int
    q_head: int
    k_page: int
    k_slot: int
    k_head: int
    v_page: int
    v_slot: int
    v_head: int
    table: int
    out_batch: int
    out_token: int
    out_head: int


class Numbers(NamedTuple):
    """The arguments that are plain numbers; k_scale is part of softmax_scale here."""

    softmax_scale: float
    softcap: float
    """0 for none."""
    window: int
    """0 for none."""
    v_scale: float

    def base_2(self) -> tuple[float, float]:
        """What kernels with exp2 multiply a product q · k with, and the soft cap of that (0 for none)."""
        if self.softcap:
            return self.softmax_scale / self.softcap, self.softcap * _LOG2_E
        return self.softmax_scale * _LOG2_E, 0.0


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens over its pages of the cache; K and V are read once.

    The keys are split among programs in chunks whose size depends on q_len, head counts and dtype only, and results
    are added up in fixed order: the same call gives the same bits, and a sequence has the same bits in every batch.
    Lengths are read on the device: a captured CUDA graph serves every length that the block table has room for.

    Args:
        q: [batch, q_len, num_q_heads, head_dim], float32, bfloat16 or float16: the newest q_len tokens of each
            sequence (1 in decoding). num_q_heads is any multiple of num_kv_heads.
        key_cache: [num_pages, page_size, num_kv_heads, head_dim], or with kv_layout="HND"
            [num_pages, num_kv_heads, page_size, head_dim]; q's dtype or float8_e4m3fn, any strides.
        value_cache: shape and dtype of key_cache.
        block_table: [batch, max_pages] int32, the pages of each sequence in order. What lies past a sequence's length
            (or before its window) is not read. A page that the cache does not have gives a NaN row.
        cache_seqlens: [batch] int32, the keys of each sequence, the newest tokens included, which are already in the
            cache. 0 gives zeros and an lse of -inf; negative, or more than the block table has room for, a NaN row.
        causal: query i of q_len sees the keys up to position cache_seqlens - q_len + i; else all keys.
        softmax_scale: what products are multiplied with, by default 1 / sqrt(head_dim).
        window_size: with causal only: a query sees this many keys, its own included.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: [num_q_heads], any float dtype: a logit a head that takes part in the softmax and has no value.
        kv_layout: "NHD" or "HND", the order of the caches' dimensions.
        k_scale, v_scale: what the values in a float8_e4m3fn cache are multiplied with.
        workspace: float32, contiguous: memory for partial results, at least
            batch · num_q_heads · q_len · (head_dim + 2) · ceil(max_pages · page_size / 256) elements; by default
            allocated in the call.
        return_lse: whether to return the lse as well.
        out: where the result is written: shape and dtype of q; may be exactly q.

    Returns:
        The result, shape and dtype of q; with return_lse also the natural logarithm of each softmax's denominator (the
        sink included), float32 [batch, num_q_heads, q_len].

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, value or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    tensors = (q, key_cache, value_cache, block_table, cache_seqlens, sinks)
    values = (causal, softmax_scale, window_size, softcap, kv_layout, k_scale, v_scale)
    if out is None and workspace is None:
        return _paged_attention_lse(*tensors, *values) if return_lse else _paged_attention(*tensors, *values)
    if out is None:
        _check(*tensors, *values, workspace=workspace)
        out = contiguous_like(q)
    lse = None
    if return_lse:
        _check(*tensors, *values, out, None, workspace)
        lse = _new_lse(q)
    _paged_attention_out(*tensors, *values, out, lse, workspace)
    return out if lse is None else (out, lse)


def describe(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    tensors = (q, key_cache, value_cache, block_table, cache_seqlens, sinks)
    values = (causal, softmax_scale, window_size, softcap, kv_layout, k_scale, v_scale)
    _check(*tensors, *values, out, None, workspace)
    return _desc(values, tensors, out, return_lse, _aligned(*tensors, out))


def _check(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    sinks: Any,
    causal: Any,
    softmax_scale: Any,
    window_size: Any,
    softcap: Any,
    kv_layout: Any,
    k_scale: Any,
    v_scale: Any,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> None:
    """Everything but overlaps of memory."""
    required = {
        "q": q,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
    }
    tensors = {**required, "sinks": sinks, "out": out, "workspace": workspace}
    if not (
        all(isinstance(t, Tensor) for t in required.values())
        and all(isinstance(t, OPTIONAL_TENSOR) for t in tensors.values())
    ):
        raise_not_tensor(_OP, tuple(required), **tensors)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(_OP, _UNFUSED, **tensors)
    check_tensor(_OP, "q", q)
    if q.ndim != 4:
        raise ArgumentValueError(_OP, "q", "shape [batch, q_len, num_q_heads, head_dim]", list(q.shape))
    check_caches(_OP, key_cache, value_cache, kv_layout, q.dtype, "q")
    batch, _, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, cache_dim = nhd_shape(key_cache, kv_layout)
    if cache_dim != head_dim:
        raise ArgumentValueError(_OP, "key_cache", f"the head_dim of q, {head_dim}", cache_dim)
    if num_q_heads % max(num_kv_heads, 1) or (num_q_heads and not num_kv_heads):
        raise ArgumentValueError(_OP, "q", f"a multiple of {num_kv_heads} heads, those of key_cache", num_q_heads)
    _check_indices(batch, page_size, block_table, cache_seqlens)
    _check_sinks(sinks, num_q_heads)
    for name, value in tensors.items():
        if value is not None and value.device != q.device:
            raise ArgumentValueError(_OP, name, f"the device of q, {q.device}", value.device)
    check_scales(_OP, key_cache.dtype, k_scale=k_scale, v_scale=v_scale)
    _check_options(causal, softmax_scale, window_size, softcap)
    if out is not None:
        check_like(_OP, "out", out, q, "q")
    if workspace is not None:
        _check_workspace(
            workspace, q.numel() // head_dim * (head_dim + 2) * -(-block_table.shape[1] * page_size // 256)
        )


def _check_indices(batch: int, page_size: int, block_table: Tensor, cache_seqlens: Tensor) -> None:
    for name, value, expected in (
        ("block_table", block_table, f"shape [{batch}, max_pages], a row for each sequence of q"),
        ("cache_seqlens", cache_seqlens, f"shape [{batch}], a length for each sequence of q"),
    ):
        if value.dtype != torch.int32:
            raise ArgumentTypeError(_OP, name, "int32", value.dtype)
        if value.ndim != (2 if name == "block_table" else 1) or value.shape[0] != batch:
            raise ArgumentValueError(_OP, name, expected, list(value.shape))
    if block_table.shape[1] * page_size >= 2**31:
        raise ArgumentValueError(_OP, "block_table", "room for fewer than 2^31 keys", block_table.shape[1] * page_size)


def _check_sinks(sinks: Tensor | None, num_q_heads: int) -> None:
    if sinks is not None:
        check_tensor(_OP, "sinks", sinks)
        if sinks.shape != (num_q_heads,):
            raise ArgumentValueError(_OP, "sinks", f"shape [{num_q_heads}], a logit for each head", list(sinks.shape))


def _check_options(causal: Any, softmax_scale: Any, window_size: Any, softcap: Any) -> None:
    if not isinstance(causal, bool):
        raise ArgumentTypeError(_OP, "causal", "a bool", type(causal).__name__)
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, (float, int, torch.SymFloat)):
            raise ArgumentTypeError(_OP, name, "a number or None", type(value).__name__)
    if softcap is not None and not softcap > 0:
        raise ArgumentValueError(_OP, "softcap", "a positive number or None", softcap)
    if window_size is not None:
        if isinstance(window_size, bool) or not isinstance(window_size, (int, torch.SymInt)):
            raise ArgumentTypeError(_OP, "window_size", "an int or None", type(window_size).__name__)
        if window_size < 1:
            raise ArgumentValueError(_OP, "window_size", "a positive number of keys or None", window_size)
        if not causal:
            raise ArgumentValueError(_OP, "window_size", "None without causal", window_size)


def _check_workspace(workspace: Tensor, elements: int) -> None:
    if workspace.dtype != torch.float32:
        raise ArgumentTypeError(_OP, "workspace", "float32", workspace.dtype)
    if workspace.numel() < elements or not workspace.is_contiguous():
        got = f"{workspace.numel()}" + ("" if workspace.is_contiguous() else ", not contiguous")
        raise ArgumentValueError(_OP, "workspace", f"at least {elements} contiguous elements", got)


def _numbers(q: Tensor, values: tuple[Any, ...]) -> Numbers:
    _, softmax_scale, window_size, softcap, _, k_scale, v_scale = values
    scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if softmax_scale is None else softmax_scale
    # A window of 2^30 keys hides nothing, and leaves room for sums in int32.
    return Numbers(scale * k_scale, softcap or 0.0, min(window_size or 0, 2**30), v_scale)


def _aligned(*tensors: Tensor | None) -> bool:
    """Whether the tensors of numbers start at a multiple of 16 bytes."""
    return not any(t.data_ptr() & 15 for t in tensors if t is not None and t.is_floating_point())


def _strides(values: tuple[Any, ...], tensors: Tensors, out: Tensor | None) -> Strides:
    q, key_cache, value_cache, block_table, *_ = tensors
    assert q is not None
    assert key_cache is not None
    assert value_cache is not None
    assert block_table is not None
    _, q_len, heads, dim = q.shape
    layout = values[4]
    fresh = (q_len * heads * dim, heads * dim, dim)
    out_batch, out_token, out_head = fresh if out is None else out.stride()[:3]
    return Strides(
        q.stride(0),
        q.stride(1),
        q.stride(2),
        *nhd_strides(key_cache, layout),
        *nhd_strides(value_cache, layout),
        block_table.stride(0),
        out_batch,
        out_token,
        out_head,
    )


def _desc(values: tuple[Any, ...], tensors: Tensors, out: Tensor | None, return_lse: bool, aligned: bool) -> Desc:
    q, key_cache, value_cache, block_table, cache_seqlens, sinks = tensors
    assert q is not None
    assert key_cache is not None
    assert block_table is not None
    causal, _, window_size, softcap, layout, *_ = values
    num_pages, page_size, num_kv_heads, head_dim = nhd_shape(key_cache, layout)
    named = zip(
        ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "sinks", "out"),
        (q, key_cache, value_cache, block_table, cache_seqlens, sinks, out),
        strict=True,
    )
    copied = tuple(name for name, t in named if t is not None and uneven(t))
    strides = _strides(values, tensors, out)
    size, cache_size = q.element_size(), key_cache.element_size()
    q_bits = strides.q_batch | strides.q_token | strides.q_head | strides.out_batch | strides.out_token
    cache_bits = strides.k_page | strides.k_slot | strides.k_head | strides.v_page | strides.v_slot | strides.v_head
    aligned = aligned and not ((q_bits | strides.out_head) * size | cache_bits * cache_size) & 15
    return Desc(
        q.device,
        q.dtype,
        key_cache.dtype,
        None if sinks is None else sinks.dtype,
        q.shape[0],
        q.shape[1],
        q.shape[2],
        num_kv_heads,
        head_dim,
        num_pages,
        page_size,
        block_table.shape[1],
        causal,
        window_size is not None,
        softcap is not None,
        return_lse,
        aligned,
        copied,
    )


class _Call(NamedTuple):
    """A plan: `run(workspace, out, lse)` after the inputs, and the float32 elements of the workspace it wants."""

    run: Callable[..., None]
    elements: int

    def __call__(self, *args: Any) -> None:
        self.run(*args)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Any:
    """A `_Call`."""
    *options, return_lse = values
    *inputs, out = tensors
    _check(*(*inputs, *options, out))
    q = inputs[0]
    assert q is not None
    if q.numel() == 0:
        return _Call(lambda *args: None, 0)
    desc = _desc(tuple(options), tuple(inputs), out, return_lse, aligned)
    if desc.copied:
        return _Call(partial(_run_on_copies, values), 0)
    run = partial(
        dispatch.prepare(_OP, desc), _numbers(q, tuple(options)), _strides(tuple(options), tuple(inputs), out)
    )
    return _Call(run, partial_elements(desc))


_plans = Plans(_make_plan)


def _find(values: tuple[Any, ...], tensors: Tensors) -> _Call:
    plan: Any = _plans.find(values, tensors)
    return plan  # type: ignore[no-any-return]


def _run_on_copies(values: tuple[Any, ...], *tensors: Tensor | None) -> None:
    """The slower path: what is not contiguous in its last dimension is copied."""
    *inputs, _, out, lse = (None if t is None else t.contiguous() if uneven(t) else t for t in tensors)
    target = tensors[-2]
    assert out is not None
    assert target is not None
    _run(_find(values, (*inputs, out)), tuple(inputs), None, out, lse)
    if out is not target:
        target.copy_(out)


def _run(plan: _Call, inputs: Tensors, workspace: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    if workspace is None and plan.elements:
        workspace = torch.empty(plan.elements, dtype=torch.float32, device=out.device)
    plan.run(*inputs, workspace, out, lse)


def _new_lse(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _kernel(*args: Any) -> Tensor:
    inputs, values = args[:6], args[6:]
    plan = _find((*values, False), (*inputs, None))
    out = contiguous_like(inputs[0])
    _run(plan, inputs, None, out, None)
    return out


def _kernel_lse(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, values = args[:6], args[6:]
    plan = _find((*values, True), (*inputs, None))
    out, lse = contiguous_like(inputs[0]), _new_lse(inputs[0])
    _run(plan, inputs, None, out, lse)
    return out, lse


def _kernel_out(*args: Any) -> None:
    inputs, values, (out, lse, workspace) = args[:6], args[6:-3], args[-3:]
    plan = _find((*values, lse is not None), (*inputs, out))
    named = dict(zip(_INPUTS, inputs, strict=True))
    check_output(_OP, "out", out, **named)
    if workspace is not None:
        check_output(_OP, "workspace", workspace, **named, out=out)
    _run(plan, inputs, workspace, out, lse)


def _fake(*args: Any) -> Tensor:
    _check(*args)
    return contiguous_like(args[0])


def _fake_lse(*args: Any) -> tuple[Tensor, Tensor]:
    _check(*args)
    return contiguous_like(args[0]), _new_lse(args[0])


_INPUTS = ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "sinks")
_ARGUMENTS = (
    "Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor cache_seqlens, Tensor? sinks,"
    " bool causal, float? softmax_scale, SymInt? window_size, float? softcap, str kv_layout, float k_scale,"
    " float v_scale"
)
_paged_attention = register(f"paged_attention({_ARGUMENTS}) -> Tensor", _kernel, _fake, _check)
_paged_attention_lse = register(
    f"paged_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _kernel_lse, _fake_lse, _check
)
_paged_attention_out = register(
    f"paged_attention_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    _kernel_out,
    _check,
    _check,
)
