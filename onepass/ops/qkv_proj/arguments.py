"""The checks of qkv_proj's arguments: all of them but overlaps of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_tensor,
    raise_not_tensor,
    raise_requires_grad,
)
from onepass.ops.rope_call import check_flag, check_number, check_out_heads, check_table, check_weight, needs_copy

_UNFUSED = "rms_norm, torch.nn.functional.linear and apply_rope"

# In the order of the registered op: what the product reads, what follows it, where it goes.
INPUTS = ("x", "w_qkv", "bias", "norm_weight", "q_norm_weight", "k_norm_weight", "cos_sin_cache")
CACHES = ("key_cache", "value_cache")
INDICES = ("positions", "slot_mapping")
OUTPUTS = ("q_out", "k_out", "v_out")


def check(
    x: Any,
    w_qkv: Any,
    bias: Any,
    norm_weight: Any,
    q_norm_weight: Any,
    k_norm_weight: Any,
    cos_sin_cache: Any,
    key_cache: Any,
    value_cache: Any,
    positions: Any,
    slot_mapping: Any,
    num_q_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    norm_eps: Any,
    norm_weight_offset: Any,
    qk_norm_eps: Any,
    interleaved: Any,
    q_out: Any = None,
    k_out: Any = None,
    v_out: Any = None,
) -> None:
    """Everything but overlaps of memory."""
    op = "qkv_proj"
    inputs = (x, w_qkv, bias, norm_weight, q_norm_weight, k_norm_weight, cos_sin_cache, key_cache, value_cache)
    values = (*inputs, positions, slot_mapping, q_out, k_out, v_out)
    tensors = dict(zip((*INPUTS, *CACHES, *INDICES, *OUTPUTS), values, strict=True))
    if not (
        isinstance(x, Tensor) and isinstance(w_qkv, Tensor) and all(isinstance(t, OPTIONAL_TENSOR) for t in values)
    ):
        raise_not_tensor(op, ("x", "w_qkv"), **tensors)
    numbers = {"norm_eps": norm_eps, "norm_weight_offset": norm_weight_offset, "qk_norm_eps": qk_norm_eps}
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _check_numbers(op, numbers, sizes, interleaved)
    if torch.is_grad_enabled() and any_requires_grad(*values):
        raise_requires_grad(op, _UNFUSED, **tensors)
    _check_groups(op, tensors)
    _check_product(op, tensors, (num_q_heads + 2 * num_kv_heads) * head_dim)
    if q_norm_weight is not None:
        for name in ("q_norm_weight", "k_norm_weight"):
            check_tensor(op, name, tensors[name])
            check_weight(op, name, tensors[name], head_dim, x, "x")
    if cos_sin_cache is not None:
        check_table(op, cos_sin_cache, positions, x, "x", head_dim)
    if key_cache is not None:
        _check_append(op, tensors, num_kv_heads, head_dim)
    for name, heads in zip(OUTPUTS, (num_q_heads, num_kv_heads, num_kv_heads), strict=True):
        if tensors[name] is not None:
            check_out_heads(op, name, tensors[name], (x.shape[0], heads, head_dim), x, "x")


def _check_numbers(op: str, numbers: dict[str, Any], sizes: dict[str, Any], interleaved: Any) -> None:
    for name, value in numbers.items():
        check_number(op, name, value)
    check_flag(op, "interleaved", interleaved)
    for name, value in sizes.items():
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise ArgumentTypeError(op, name, "an int", type(value).__name__)
        if value < 1:
            raise ArgumentValueError(op, name, "at least 1", value)


def _check_groups(op: str, tensors: dict[str, Any]) -> None:
    """Tensors that go together are all there, or none of them is."""
    for group in (("q_norm_weight", "k_norm_weight"), ("cos_sin_cache", "positions"), (*CACHES, "slot_mapping")):
        for name in group:
            if tensors[name] is None and any(tensors[other] is not None for other in group):
                others = " and ".join(f"'{other}'" for other in group if other != name)
                raise ArgumentValueError(op, name, f"a tensor, together with {others}", None)


def _check_product(op: str, tensors: dict[str, Any], features: int) -> None:
    """x, w_qkv, bias and norm_weight."""
    x = tensors["x"]
    check_tensor(op, "x", x)
    if x.ndim != 2 or x.shape[1] == 0:
        raise ArgumentValueError(op, "x", "shape [num_tokens, hidden_size]", list(x.shape))
    hidden_size = x.shape[1]
    shape = (features, hidden_size)
    _check_like(op, "w_qkv", tensors["w_qkv"], x, shape, "(num_q_heads + 2 * num_kv_heads) * head_dim features")
    for name, size in (("bias", features), ("norm_weight", hidden_size)):
        if tensors[name] is not None:
            check_tensor(op, name, tensors[name])
            if tensors[name].shape != (size,):
                raise ArgumentValueError(op, name, f"shape [{size}]", list(tensors[name].shape))
            _check_device(op, name, tensors[name], x)


def _check_append(op: str, tensors: dict[str, Any], num_kv_heads: int, head_dim: int) -> None:
    """The caches and slot_mapping."""
    x, slots, shape = tensors["x"], tensors["slot_mapping"], tensors["key_cache"].shape
    for name in CACHES:
        _check_cache(op, name, tensors[name], x, num_kv_heads, head_dim)
    if tensors["value_cache"].shape != shape:
        expected = f"the shape of key_cache, {list(shape)}"
        raise ArgumentValueError(op, "value_cache", expected, list(tensors["value_cache"].shape))
    if slots.dtype != torch.int64:
        raise ArgumentTypeError(op, "slot_mapping", "int64", slots.dtype)
    if slots.shape != x.shape[:1]:
        raise ArgumentValueError(op, "slot_mapping", f"shape [{x.shape[0]}], x's tokens", list(slots.shape))
    _check_device(op, "slot_mapping", slots, x)


def _check_device(op: str, argument: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of x, {x.device}", value.device)


def _check_like(op: str, argument: str, value: Tensor, x: Tensor, shape: tuple[int, ...], why: str) -> None:
    if value.dtype != x.dtype:
        raise ArgumentTypeError(op, argument, f"the dtype of x, {x.dtype}", value.dtype)
    if value.shape != shape:
        raise ArgumentValueError(op, argument, f"shape {list(shape)}, {why}", list(value.shape))
    _check_device(op, argument, value, x)


def _check_cache(op: str, argument: str, cache: Tensor, x: Tensor, num_kv_heads: int, head_dim: int) -> None:
    if cache.ndim != 4 or cache.shape[2:] != (num_kv_heads, head_dim) or cache.shape[1] == 0:
        expected = f"shape [num_pages, page_size, {num_kv_heads}, {head_dim}]"
        raise ArgumentValueError(op, argument, expected, list(cache.shape))
    _check_like(op, argument, cache, x, tuple(cache.shape), "")
    if needs_copy(cache):
        raise ArgumentValueError(op, argument, "a contiguous last dimension", f"strides {list(cache.stride())}")
