"""append_kv: new keys and values into their slots of a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import any_requires_grad, check_like, check_tensor, raise_not_tensor, raise_requires_grad
from onepass.ops.kv_cache import check_caches, check_scales, nhd_shape, nhd_strides, uneven
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import check_output

_OP = "append_kv"
_UNFUSED = "index_put of k and v into the caches"


class Desc(NamedTuple):
    """What an append_kv kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    aligned: bool
    """Pointers and strides are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments whose last dimension is not contiguous: they are copied, whole caches too, there and back."""

    def notes(self) -> tuple[str, ...]:
        notes = [f"'{name}' is not contiguous in its last dimension and is copied" for name in self.copied]
        if not self.aligned:
            notes.append("a pointer or a stride is not a multiple of 16 bytes: narrower memory accesses")
        return tuple(notes)


class Strides(NamedTuple):
    """Distances in elements."""

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


def append_kv(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v of each token into its slot of the caches, which is all that changes.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16, any strides.
        v: shape, dtype and device of k.
        key_cache: [num_pages, page_size, num_kv_heads, head_dim], or with kv_layout="HND"
            [num_pages, num_kv_heads, page_size, head_dim]; k's dtype or float8_e4m3fn, any strides.
        value_cache: shape and dtype of key_cache.
        slot_mapping: [num_tokens] int64: page · page_size + slot of the page. A token whose slot is -1, or any other
            that the cache does not have, is skipped. Of two tokens with the same slot either may stay.
        kv_layout: "NHD" or "HND", the order of the caches' dimensions.
        k_scale, v_scale: what k and v are divided by before they are rounded to float8_e4m3fn; values past its range
            become its largest.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, value or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.
    """
    _append_kv(k, v, key_cache, value_cache, slot_mapping, kv_layout, k_scale, v_scale)


def describe(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    tensors = (k, v, key_cache, value_cache, slot_mapping)
    _check(*tensors, kv_layout, k_scale, v_scale)
    aligned = not any(t.data_ptr() & 15 for t in tensors[:4])
    return _desc(kv_layout, tensors, aligned)


def _check(
    k: Any, v: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, kv_layout: Any, k_scale: Any, v_scale: Any
) -> None:
    """Everything but overlaps of memory."""
    tensors = {"k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping}
    if not all(isinstance(t, Tensor) for t in tensors.values()):
        raise_not_tensor(_OP, tuple(tensors), **tensors)
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(_OP, _UNFUSED, **tensors)
    check_tensor(_OP, "k", k)
    if k.ndim != 3:
        raise ArgumentValueError(_OP, "k", "shape [num_tokens, num_kv_heads, head_dim]", list(k.shape))
    check_like(_OP, "v", v, k, "k")
    check_caches(_OP, key_cache, value_cache, kv_layout, k.dtype, "k")
    _, _, heads, dim = nhd_shape(key_cache, kv_layout)
    if (heads, dim) != tuple(k.shape[1:]):
        expected = f"the num_kv_heads and head_dim of k, {list(k.shape[1:])}"
        raise ArgumentValueError(_OP, "key_cache", expected, [heads, dim])
    if slot_mapping.dtype != torch.int64:
        raise ArgumentTypeError(_OP, "slot_mapping", "int64", slot_mapping.dtype)
    if slot_mapping.shape != k.shape[:1]:
        raise ArgumentValueError(_OP, "slot_mapping", f"shape [{k.shape[0]}], a slot a token", list(slot_mapping.shape))
    for name, value in tensors.items():
        if value.device != k.device:
            raise ArgumentValueError(_OP, name, f"the device of k, {k.device}", value.device)
    check_scales(_OP, key_cache.dtype, k_scale=k_scale, v_scale=v_scale)


def _strides(kv_layout: str, tensors: Tensors) -> Strides:
    k, v, key_cache, value_cache, _ = tensors
    assert k is not None
    assert v is not None
    assert key_cache is not None
    assert value_cache is not None
    return Strides(
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *nhd_strides(key_cache, kv_layout),
        *nhd_strides(value_cache, kv_layout),
    )


def _desc(kv_layout: str, tensors: Tensors, aligned: bool) -> Desc:
    k, _, key_cache, *_ = tensors
    assert k is not None
    assert key_cache is not None
    num_pages, page_size, heads, dim = nhd_shape(key_cache, kv_layout)
    strides = _strides(kv_layout, tensors)
    bits = (strides.k_token | strides.k_head | strides.v_token | strides.v_head) * k.element_size()
    for stride in strides[4:]:
        bits |= stride * key_cache.element_size()
    names = ("k", "v", "key_cache", "value_cache", "slot_mapping")
    copied = tuple(name for name, t in zip(names, tensors, strict=True) if t is not None and uneven(t))
    aligned = aligned and not bits & 15
    return Desc(k.device, k.dtype, key_cache.dtype, k.shape[0], heads, dim, num_pages, page_size, aligned, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    kv_layout, k_scale, v_scale = values
    _check(*tensors, *values)
    k, _, key_cache, *_ = tensors
    assert k is not None
    assert key_cache is not None
    if k.numel() == 0 or key_cache.numel() == 0:
        return lambda *args: None
    desc = _desc(kv_layout, tensors, aligned)
    if desc.copied:
        return partial(_run_on_copies, values)
    run: Callable[..., None] = dispatch.prepare(_OP, desc)
    return partial(run, (k_scale, v_scale), _strides(kv_layout, tensors))


_plans = Plans(_make_plan)


def _run_on_copies(values: tuple[Any, ...], *tensors: Tensor) -> None:
    """The slower path: what is not contiguous in its last dimension is copied, caches there and back."""
    copies = tuple(t.contiguous() if uneven(t) else t for t in tensors)
    _plans.find(values, copies)(*copies)
    for cache, copy in zip(tensors[2:4], copies[2:4], strict=True):
        if copy is not cache:
            cache.copy_(copy)


def _kernel(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
) -> None:
    plan = _plans.find((kv_layout, k_scale, v_scale), (k, v, key_cache, value_cache, slot_mapping))
    check_output(_OP, "key_cache", key_cache, k=k, v=v, slot_mapping=slot_mapping)
    check_output(_OP, "value_cache", value_cache, k=k, v=v, slot_mapping=slot_mapping, key_cache=key_cache)
    if value_cache.data_ptr() == key_cache.data_ptr() and key_cache.numel():
        raise ArgumentValueError(_OP, "value_cache", "memory apart from 'key_cache'", "the same memory")
    plan(k, v, key_cache, value_cache, slot_mapping)


_append_kv = register(
    "append_kv(Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str kv_layout,"
    " float k_scale, float v_scale) -> ()",
    _kernel,
    _check,
    _check,
)
