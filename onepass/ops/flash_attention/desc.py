"""What an attention kernel is chosen by, and the checks of a call's arguments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import (
    OPTIONAL_TENSOR,
    any_requires_grad,
    check_like,
    check_tensor,
    raise_not_tensor,
    raise_requires_grad,
)

OP = "flash_attention"
UNBOUNDED = -1
_UNFUSED = "torch.nn.functional.scaled_dot_product_attention"
_INDEX_DTYPES = (torch.int32, torch.int64)
_UNALIGNED = "a pointer or a stride is not a multiple of 16 bytes: narrower memory accesses, and not the 'cuda' kernel"


class Desc(NamedTuple):
    """What an attention kernel is chosen by, and the numbers of the call."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    """Sequences."""
    seqlen_q: int
    """Queries of a sequence; packed (`varlen`): of the longest one, as the caller says."""
    seqlen_k: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    left: int
    """Keys that a query sees before the one at its own position; -1: all of them."""
    right: int
    """Keys that it sees after that; 0 is causal, -1: all of them."""
    softcap: float | None
    sinks_dtype: torch.dtype | None
    index_dtype: torch.dtype | None
    """The dtype of cu_seqlens_q and cu_seqlens_k; None: sequences are not packed."""
    total_q: int
    """Rows of the packed q; batch * seqlen_q where nothing is packed."""
    total_k: int
    has_lse: bool
    aligned: bool
    """Pointers and strides of q, k, v and out are multiples of 16 bytes."""
    far_rows: bool
    """256 tokens of q, k, v or out lie 2^31 elements apart, or further."""
    copied: tuple[str, ...]
    """Arguments that are copied to or from contiguous memory first."""

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def varlen(self) -> bool:
        """Sequences lie packed one after the other, with bounds in cu_seqlens_q and cu_seqlens_k."""
        return self.index_dtype is not None

    def notes(self) -> tuple[str, ...]:
        notes = [
            f"the last dimension of '{n}' is not contiguous: it is copied to contiguous memory" for n in self.copied
        ]
        return (*notes, *(() if self.aligned else (_UNALIGNED,)))


class Options(NamedTuple):
    """The arguments of a call that are no tensors."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    softmax_scale: float | None
    left: int
    right: int
    softcap: float | None


def window_bounds(window_size: Any) -> tuple[int, int]:
    """(left, right) of the argument window_size, before `causal` is applied."""
    if window_size is None:
        return UNBOUNDED, UNBOUNDED
    if isinstance(window_size, int) and not isinstance(window_size, bool):
        if window_size < 1:
            raise ArgumentValueError(OP, "window_size", "at least 1 key", window_size)
        return window_size - 1, window_size - 1
    pair = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise ArgumentTypeError(OP, "window_size", "None, an int or a pair of ints (left, right)", repr(window_size))
    if min(pair) < UNBOUNDED:
        raise ArgumentValueError(OP, "window_size", "no number below -1, which is no bound", pair)
    return pair[0], pair[1]


def make_desc(
    options: Options,
    tensors: dict[str, Tensor | None],
    has_lse: bool,
    aligned: bool,
    far_rows: bool,
    copied: tuple[str, ...] = (),
) -> Desc:
    """The Desc of a checked call."""
    q, k, sinks, cu_seqlens_q = tensors["q"], tensors["k"], tensors["sinks"], tensors["cu_seqlens_q"]
    assert q is not None
    assert k is not None
    *batch, tokens_q, num_q_heads, head_dim = q.shape
    tokens_k, num_kv_heads = k.shape[-3], k.shape[-2]
    left, right = options.left, 0 if options.causal else options.right
    if cu_seqlens_q is None:
        num_sequences, total_q, total_k = batch[0], batch[0] * tokens_q, batch[0] * tokens_k
        seqlen_q, seqlen_k = tokens_q, tokens_k
        # A bound that no query meets is none: more kernels can run the call. Not so for packed sequences, of which a
        # row must not know how many there are.
        left = UNBOUNDED if left >= seqlen_k - 1 else left
        right = UNBOUNDED if right >= max(seqlen_q - 1, 0) else right
    else:
        num_sequences, total_q, total_k = cu_seqlens_q.shape[0] - 1, tokens_q, tokens_k
        seqlen_q, seqlen_k = min(options.max_seqlen_q, tokens_q), min(options.max_seqlen_k, tokens_k)
    return Desc(
        q.device,
        q.dtype,
        num_sequences,
        seqlen_q,
        seqlen_k,
        num_q_heads,
        num_kv_heads,
        head_dim,
        head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale),
        left,
        right,
        None if options.softcap is None else float(options.softcap),
        None if sinks is None else sinks.dtype,
        None if cu_seqlens_q is None else cu_seqlens_q.dtype,
        total_q,
        total_k,
        has_lse,
        aligned,
        far_rows,
        copied,
    )


def check(options: Options, tensors: dict[str, Any]) -> None:
    """Everything but overlaps of memory and what stands in cu_seqlens."""
    varlen = tensors["cu_seqlens_q"] is not None or tensors["cu_seqlens_k"] is not None
    required = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if varlen else ("q", "k", "v")
    for name, value in tensors.items():
        if not isinstance(value, Tensor if name in required else OPTIONAL_TENSOR):
            raise_not_tensor(OP, required, **{name: value})
    if torch.is_grad_enabled() and any_requires_grad(*tensors.values()):
        raise_requires_grad(OP, _UNFUSED, **tensors)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    check_tensor(OP, "q", q)
    shape = "[total_q, num_q_heads, head_dim]" if varlen else "[batch, seqlen_q, num_q_heads, head_dim]"
    if q.ndim != (3 if varlen else 4) or q.shape[-1] == 0:
        raise ArgumentValueError(OP, "q", f"shape {shape}", list(q.shape))
    _check_keys(q, k, v, varlen)
    if tensors["out"] is not None:
        check_like(OP, "out", tensors["out"], q, "q")
    _check_sinks(tensors["sinks"], q)
    if varlen:
        _check_sequences(tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], q)
    if tensors["lse"] is not None:
        _check_lse(tensors["lse"], q)
    _check_numbers(options)


def _check_keys(q: Tensor, k: Tensor, v: Tensor, varlen: bool) -> None:
    if k.dtype != q.dtype:
        raise ArgumentTypeError(OP, "k", f"the dtype of q, {q.dtype}", k.dtype)
    if k.device != q.device:
        raise ArgumentValueError(OP, "k", f"the device of q, {q.device}", k.device)
    num_q_heads, head_dim = q.shape[-2:]
    same = k.ndim == q.ndim and k.shape[-1] == head_dim and (varlen or k.shape[0] == q.shape[0])
    if not same:
        sizes = (
            f"[total_k, num_kv_heads, {head_dim}]" if varlen else f"[{q.shape[0]}, seqlen_k, num_kv_heads, {head_dim}]"
        )
        raise ArgumentValueError(OP, "k", f"shape {sizes}", list(k.shape))
    if k.shape[-2] == 0 or num_q_heads % k.shape[-2] != 0:
        expected = f"a number of heads that divides the {num_q_heads} heads of q"
        raise ArgumentValueError(OP, "k", expected, k.shape[-2])
    check_like(OP, "v", v, k, "k")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    check_tensor(OP, "sinks", sinks)
    if sinks.shape != q.shape[-2:-1]:
        raise ArgumentValueError(OP, "sinks", f"shape [{q.shape[-2]}], a number for each head of q", list(sinks.shape))
    if sinks.device != q.device:
        raise ArgumentValueError(OP, "sinks", f"the device of q, {q.device}", sinks.device)


def _check_sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value.dtype not in _INDEX_DTYPES:
            raise ArgumentTypeError(OP, name, "int32 or int64", value.dtype)
        if value.ndim != 1 or value.shape[0] == 0:
            raise ArgumentValueError(OP, name, "shape [number of sequences + 1]", list(value.shape))
        if value.device != q.device:
            raise ArgumentValueError(OP, name, f"the device of q, {q.device}", value.device)
    check_like(OP, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q, "cu_seqlens_q")


def _check_lse(lse: Tensor, q: Tensor) -> None:
    *batch, tokens, heads, _ = q.shape
    if lse.dtype != torch.float32:
        raise ArgumentTypeError(OP, "lse", "float32", lse.dtype)
    if list(lse.shape) != [*batch, heads, tokens] or not lse.is_contiguous():
        raise ArgumentValueError(OP, "lse", f"contiguous memory of shape {[*batch, heads, tokens]}", list(lse.shape))
    if lse.device != q.device:
        raise ArgumentValueError(OP, "lse", f"the device of q, {q.device}", lse.device)


def _check_numbers(options: Options) -> None:
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(options, name)
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise ArgumentTypeError(OP, name, "an int", type(value).__name__)
        if value < 0:
            raise ArgumentValueError(OP, name, "at least 0", value)
    for name in ("softmax_scale", "softcap"):
        value = getattr(options, name)
        if value is None:
            continue
        if not isinstance(value, (float, int, torch.SymFloat)) or isinstance(value, bool):
            raise ArgumentTypeError(OP, name, "a number or None", type(value).__name__)
        if not math.isfinite(value) or (name == "softcap" and value <= 0):
            raise ArgumentValueError(OP, name, "a finite number" + (" above 0" if name == "softcap" else ""), value)
