"""flash_attention: exact attention in one kernel, with memory that grows linearly with the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentValueError
from onepass.ops.flash_attention.desc import OP, Desc, Options, check, make_desc, window_bounds
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import aligned_16, check_output, contiguous_like, overlaps

__all__ = [
    "Desc",
    "Strides",
    "describe",
    "describe_flash_attention_varlen",
    "flash_attention",
    "flash_attention_varlen",
]


class Strides(NamedTuple):
    """Distances in elements between sequences (packed: 0), tokens and heads; 0 also for dimensions of size 1."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    out: tuple[int, int, int]


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v for each head, without the matrix of scores ever being in memory.

    Query i of a sequence stands at position i + seqlen_k - seqlen_q: with `causal` the last query sees the last key
    (bottom-right alignment). A query that sees no key gives zeros, and an lse of -inf. Scores and sums are float32; a
    kernel may round the softmax's weights to the inputs' dtype before they meet v. A row's bits depend on its sequence,
    the dtype, the options, the alignment of memory and the backend, never on the other sequences of the batch. A NaN or
    infinity in a key or value may show in the rows near it that do not see that key, as in any product of matrices; in
    other sequences never.

    The keys of a query are read one block after the other: for a few queries of few sequences over many keys, as in
    decoding on a GPU, `paged_attention` shares them out.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim], float32, bfloat16 or float16. Any strides: views of a packed qkv
            and transposed tensors are read where they lie, as long as the last dimension is contiguous (else copied).
        k: [batch, seqlen_k, num_kv_heads, head_dim], dtype of q. num_kv_heads divides num_q_heads: the first
            num_q_heads / num_kv_heads heads of q share the first head of k and v, and so on.
        v: shape and dtype of k.
        causal: a query sees keys up to its own position; the right side of window_size is then 0.
        softmax_scale: by default 1 / sqrt(head_dim).
        window_size: a pair (left, right) as in flash-attention: a query sees `left` keys before the one at its position
            and `right` after it, left + 1 + right in all, -1 for no bound. An int W as `sliding_window` in Hugging Face
            models: W keys up to and with its own (and, without `causal`, as many after it): the pair (W - 1, W - 1).
        softcap: scores become softcap * tanh(score / softcap), before masks.
        sinks: [num_q_heads], any float dtype: a score for each head that joins the softmax's sum and has no value.
        return_lse: also return the logarithm of the softmax's sum.
        out: where the result is written: shape and dtype of q, may be exactly q.

    Returns:
        The result, shape and dtype of q; with `return_lse` the pair (result, lse): lse is float32
        [batch, num_q_heads, seqlen_q], the natural logarithm of the sum of exp(score), the sink's among them.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device, number or memory overlap is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Sources: Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    left, right = window_bounds(window_size)
    return _call(
        (q, k, v, sinks, None, None), Options(0, 0, causal, softmax_scale, left, right, softcap), return_lse, out
    )


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of sequences of different lengths, packed one after the other.

    The bounds are read by the kernel, never by the host, so that a captured graph can be replayed with others. Lengths
    of 0 are allowed. Rows of q that no sequence covers, or beyond max_seqlen_q in theirs, have no result: in `out` they
    stay as they are. Bounds outside the tensors are cut to them.

    Args:
        q: [total_q, num_q_heads, head_dim]; for dtypes, strides and the other options see `flash_attention`.
        k: [total_k, num_kv_heads, head_dim].
        v: shape and dtype of k.
        cu_seqlens_q: [number of sequences + 1], int32 or int64: sequence i is q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].
        cu_seqlens_k: the same for k and v, dtype and shape of cu_seqlens_q.
        max_seqlen_q: at least the length of the longest sequence in q; of all replays, in a graph.
        max_seqlen_k: likewise for k.

    Returns:
        The result, shape and dtype of q; with `return_lse` the pair (result, lse), lse float32 [num_q_heads, total_q].
    """
    left, right = window_bounds(window_size)
    options = Options(max_seqlen_q, max_seqlen_k, causal, softmax_scale, left, right, softcap)
    return _call((q, k, v, sinks, cu_seqlens_q, cu_seqlens_k), options, return_lse, out)


def _call(
    inputs: tuple[Any, ...], options: Options, return_lse: bool, out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    if out is None:
        return _flash_attention_lse(*inputs, *options) if return_lse else _flash_attention(*inputs, *options)
    if not return_lse:
        _flash_attention_out(*inputs, *options, out)
        return out
    check(options, {**_named(*inputs), "out": out})
    lse = _fresh_lse(inputs[0])
    _flash_attention_lse_out(*inputs, *options, out, lse)
    return out, lse


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    options = Options(0, 0, causal, softmax_scale, *window_bounds(window_size), softcap)
    return _describe(options, _named(q, k, v, sinks, None, None, out), return_lse)


def describe_flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    options = Options(max_seqlen_q, max_seqlen_k, causal, softmax_scale, *window_bounds(window_size), softcap)
    return _describe(options, _named(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, out), return_lse)


def _describe(options: Options, tensors: dict[str, Any], return_lse: bool) -> Desc:
    check(options, tensors)
    main = {name: tensors[name] for name in ("q", "k", "v", "out") if tensors[name] is not None}
    copied = tuple(name for name, t in main.items() if not _rows_are_contiguous(t))
    in_place = [t for name, t in main.items() if name not in copied]
    aligned = aligned_16(*in_place) and _strides_aligned(in_place, tensors["q"])
    return make_desc(options, tensors, return_lse, aligned, _far_rows(in_place), copied)


def _named(
    q: Any, k: Any, v: Any, sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, out: Any = None, lse: Any = None
) -> dict[str, Any]:
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "lse": lse,
    }


def _fresh_lse(q: Any) -> Tensor:
    *batch, tokens, heads, _ = q.shape
    return torch.empty((*batch, heads, tokens), dtype=torch.float32, device=q.device)


def _rows_are_contiguous(t: Tensor) -> bool:
    return t.shape[-1] == 1 or t.stride(-1) == 1


def _strides(t: Tensor) -> tuple[int, int, int]:
    """Of sequences, tokens, heads. The stride of a dimension of size 1 means nothing, and may be no multiple of 16."""
    *batch, tokens, heads = (0 if size == 1 else s for size, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    return (batch[0] if batch else 0, tokens, heads)


def _strides_aligned(tensors: list[Tensor], q: Tensor) -> bool:
    """Fresh tensors are contiguous: their rows are as aligned as head_dim is."""
    size = q.element_size()
    return q.shape[-1] * size % 16 == 0 and all(s * size % 16 == 0 for t in tensors for s in _strides(t))


def _far_rows(tensors: list[Tensor]) -> bool:
    return any(256 * _strides(t)[1] >= 1 << 31 for t in tensors)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    """Tensors: q, k, v, out or None where it is fresh, sinks, cu_seqlens_q, cu_seqlens_k, lse."""
    options, has_lse = Options(*values[:-1]), values[-1]
    q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, lse = tensors
    named = _named(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, out, lse)
    check(options, named)
    assert q is not None
    assert k is not None
    assert v is not None
    if q.numel() == 0:
        return lambda *args: None
    main = [t for t in (q, k, v, out) if t is not None]
    vectors = [t for t in (sinks, cu_seqlens_q, cu_seqlens_k) if t is not None]
    if not all(map(_rows_are_contiguous, main)) or not all(t.is_contiguous() for t in vectors):
        return partial(_run_on_copies, values)
    target = contiguous_like(q.to("meta")) if out is None else out
    strides = Strides(_strides(q), _strides(k), _strides(v), _strides(target))
    desc = make_desc(options, named, has_lse, aligned and _strides_aligned(main, q), _far_rows(main))
    return partial(dispatch.prepare(OP, desc), strides)


_plans = Plans(_make_plan)


def _run_on_copies(
    values: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:
    """The slower path: a last dimension that is not contiguous."""
    q, k, v = (t if _rows_are_contiguous(t) else t.contiguous() for t in (q, k, v))
    vectors = tuple(t if t is None else t.contiguous() for t in (sinks, cu_seqlens_q, cu_seqlens_k))
    target = out if _rows_are_contiguous(out) else contiguous_like(out)
    if target is not out and cu_seqlens_q is not None:
        target.copy_(out)  # some rows may have no result
    _plans.find(values, (q, k, v, target), (*vectors, lse))(q, k, v, target, lse, *vectors)
    if target is not out:
        out.copy_(target)


def _run(
    inputs: tuple[Any, ...], options: tuple[Any, ...], out: Tensor | None, lse: Tensor | None, has_lse: bool
) -> Any:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k = inputs
    plan = _plans.find((*options, has_lse), (q, k, v, out), (sinks, cu_seqlens_q, cu_seqlens_k, lse))
    if out is not None:
        _check_memory(out, q, k, v)
    target = contiguous_like(q) if out is None else out
    target_lse = _fresh_lse(q) if has_lse and lse is None else lse
    plan(q, k, v, target, target_lse, sinks, cu_seqlens_q, cu_seqlens_k)
    return target, target_lse


def _check_memory(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`out` may be q, whose rows are read by who writes them; k and v are read by all."""
    check_output(OP, "out", out, q=q, k=k, v=v)
    for name, t in (("k", k), ("v", v)):
        if out.numel() and t.numel() and (out.data_ptr() == t.data_ptr() or overlaps(out, t)):
            raise ArgumentValueError(OP, "out", f"memory apart from '{name}'", f"an overlap with '{name}'")


_INPUTS = 6  # q, k, v, sinks, cu_seqlens_q, cu_seqlens_k; the options follow, then outputs


def _kernel(*args: Any) -> Tensor:
    result: Tensor = _run(args[:_INPUTS], args[_INPUTS:], None, None, False)[0]
    return result


def _kernel_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run(args[:_INPUTS], args[_INPUTS:], None, None, True)
    return out, lse


def _kernel_out(*args: Any) -> None:
    *rest, out = args
    _run(tuple(rest[:_INPUTS]), tuple(rest[_INPUTS:]), out, None, False)


def _kernel_lse_out(*args: Any) -> None:
    *rest, out, lse = args
    _run(tuple(rest[:_INPUTS]), tuple(rest[_INPUTS:]), out, lse, True)


_OPTIONS = len(Options._fields)


def _check_call(*args: Any) -> None:
    """Inputs and options, and then outputs, if any."""
    outputs = args[_INPUTS + _OPTIONS :]
    check(Options(*args[_INPUTS : _INPUTS + _OPTIONS]), _named(*args[:_INPUTS], *outputs))


def _fake(*args: Any) -> Tensor:
    _check_call(*args)
    return contiguous_like(args[0])


def _fake_lse(*args: Any) -> tuple[Tensor, Tensor]:
    _check_call(*args)
    return contiguous_like(args[0]), _fresh_lse(args[0])


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, bool causal, float? softmax_scale, int left, int right, float? softcap"
)
_flash_attention = register(f"flash_attention({_ARGUMENTS}) -> Tensor", _kernel, _fake, _check_call)
_flash_attention_lse = register(
    f"flash_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _kernel_lse, _fake_lse, _check_call
)
_flash_attention_out = register(
    f"flash_attention_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _kernel_out, _check_call, _check_call
)
_flash_attention_lse_out = register(
    f"flash_attention_lse_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    _kernel_lse_out,
    _check_call,
    _check_call,
)
