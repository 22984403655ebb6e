"""What the ops with RoPE share around their kernels: the Desc, the strides, the checks of a table and of positions.

One family of kernels serves all of them: heads of q and of k, with a norm before or without, and heads of v that are
only copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.rows import check_output, clearly_apart, contiguous_like, copy_notes, overlaps

POSITION_DTYPES = (torch.int32, torch.int64)


class Desc(NamedTuple):
    """What a kernel with RoPE is chosen by."""

    device: torch.device
    dtype: torch.dtype
    q_weight_dtype: torch.dtype | None
    """None: no norm before the rotation."""
    k_weight_dtype: torch.dtype | None
    position_dtype: torch.dtype
    num_tokens: int
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    """Heads that are copied as they are."""
    head_dim: int
    rotary_dim: int
    interleaved: bool
    aligned: bool
    """Every pointer but the positions', and every stride between tokens and heads, is a multiple of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments whose last dimension is not contiguous: they take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class Strides(NamedTuple):
    """Distances in elements between tokens and between heads; 0 where there is one of them, or none."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    q_out_token: int
    q_out_head: int
    k_out_token: int
    k_out_head: int
    v_out_token: int
    v_out_head: int
    cache: int
    positions: int


class Heads(NamedTuple):
    """The tensors of a call: [num_tokens, heads, head_dim], None where there are none; an output of None is fresh."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    q_out: Tensor | None
    k_out: Tensor | None
    v_out: Tensor | None


def plan_call(
    heads: Heads,
    weights: tuple[Tensor | None, Tensor | None],
    cos_sin_cache: Tensor,
    positions: Tensor,
    interleaved: bool,
    aligned: bool,
    copied: tuple[str, ...] = (),
) -> tuple[Desc, Strides]:
    """What a kernel is chosen by, and the strides it gets. `aligned`: the tensors that are not copied are."""
    q, k, v, *outputs = heads
    distances: list[int] = []
    for t, like in zip((q, k, v, *outputs), (q, k, v) * 2, strict=True):
        if like is None:
            distances += (0, 0)
        elif t is None or needs_copy(t):
            distances += like.shape[1] * like.shape[2], like.shape[2]
        else:
            distances += _stride(t, 0), _stride(t, 1)
    row = cos_sin_cache.shape[1] if needs_copy(cos_sin_cache) else _stride(cos_sin_cache, 0)
    strides = Strides._make((*distances, row, _stride(positions, 0)))
    elements = 0
    for distance in distances:
        elements |= distance
    desc = Desc(
        q.device,
        q.dtype,
        None if weights[0] is None else weights[0].dtype,
        None if weights[1] is None else weights[1].dtype,
        positions.dtype,
        q.shape[0],
        q.shape[1],
        0 if k is None else k.shape[1],
        0 if v is None else v.shape[1],
        q.shape[2],
        cos_sin_cache.shape[1],
        interleaved,
        aligned and not (elements * q.element_size() | row * 4) & 15,
        copied,
    )
    return desc, strides


def _stride(t: Tensor, dim: int) -> int:
    """0 where the dimension has at most one element: its stride then says nothing."""
    return t.stride(dim) if t.shape[dim] > 1 else 0


def needs_copy(t: Tensor | None) -> bool:
    """Whether the last dimension is not contiguous."""
    return t is not None and t.shape[-1] > 1 and t.stride(-1) != 1


def dense(t: Tensor) -> Tensor:
    """`t`, or a contiguous copy where its last dimension is not contiguous."""
    return t.contiguous() if needs_copy(t) else t


def dense_output(t: Tensor) -> Tensor:
    """`t`, or contiguous memory of its shape where its last dimension is not contiguous."""
    return contiguous_like(t) if needs_copy(t) else t


def copy_back(outputs: Sequence[Tensor | None], rows: Sequence[Tensor | None]) -> None:
    """What was computed in the memory of `dense_output`."""
    for target, computed in zip(outputs, rows, strict=True):
        if target is not None and computed is not None and computed is not target:
            target.copy_(computed)


def check_heads(op: str, argument: str, value: Tensor) -> None:
    if value.ndim != 3:
        raise ArgumentValueError(op, argument, "shape [num_tokens, heads, head_dim]", list(value.shape))


def check_table(op: str, cos_sin_cache: Tensor, positions: Tensor, x: Tensor, argument: str, head_dim: int) -> None:
    """cos_sin_cache and positions, for x [num_tokens, ...]."""
    if cos_sin_cache.dtype != torch.float32:
        raise ArgumentTypeError(op, "cos_sin_cache", "float32", cos_sin_cache.dtype)
    if positions.dtype not in POSITION_DTYPES:
        raise ArgumentTypeError(op, "positions", "int32 or int64", positions.dtype)
    if cos_sin_cache.ndim != 2:
        expected = "shape [max_position, rotary_dim]"
        raise ArgumentValueError(op, "cos_sin_cache", expected, list(cos_sin_cache.shape))
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        expected = f"an even rotary_dim from 2 to head_dim = {head_dim}, its last dimension"
        raise ArgumentValueError(op, "cos_sin_cache", expected, list(cos_sin_cache.shape))
    if positions.shape != x.shape[:1]:
        expected = f"shape [{x.shape[0]}], the tokens of {argument}"
        raise ArgumentValueError(op, "positions", expected, list(positions.shape))
    for name, value in (("cos_sin_cache", cos_sin_cache), ("positions", positions)):
        if value.device != x.device:
            raise ArgumentValueError(op, name, f"the device of {argument}, {x.device}", value.device)


def check_weight(op: str, argument: str, weight: Tensor, head_dim: int, x: Tensor, x_name: str) -> None:
    """A norm's weight; its dtype is checked elsewhere."""
    if weight.shape != (head_dim,):
        raise ArgumentValueError(op, argument, f"shape [{head_dim}], a head's", list(weight.shape))
    if weight.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of {x_name}, {x.device}", weight.device)


def check_out_heads(op: str, argument: str, out: Tensor, shape: tuple[int, ...], x: Tensor, x_name: str) -> None:
    """An output [num_tokens, heads, head_dim] for x."""
    if out.dtype != x.dtype:
        raise ArgumentTypeError(op, argument, f"the dtype of {x_name}, {x.dtype}", out.dtype)
    if out.shape != shape:
        raise ArgumentValueError(op, argument, f"shape {list(shape)}", list(out.shape))
    if out.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of {x_name}, {x.device}", out.device)


def check_flag(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(op, argument, "a bool", type(value).__name__)


def check_number(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, (float, int, torch.SymFloat)):
        raise ArgumentTypeError(op, argument, "a number", type(value).__name__)


def check_positions(op: str, cos_sin_cache: Tensor, positions: Tensor) -> None:
    """Every position is in the table. Waits for the device.

    Raises:
        ArgumentValueError: one is not.
    """
    max_position = cos_sin_cache.shape[0]
    wrong = (positions < 0) | (positions >= max_position)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        got = f"{int(positions[first])} at token {first}"
        raise ArgumentValueError(op, "positions", f"positions from 0 to {max_position - 1}", got)


def check_outputs(op: str, outputs: dict[str, Tensor], sources: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Where outputs may lie: exactly on their own source (the input of the same place), apart from everything else.

    `sources` has the input of each output, in the same order.
    """
    names, source_names = list(outputs), list(sources)
    if clearly_apart(tuple(outputs.values()), (*sources.values(), *others.values())):
        # Heads are read and written in any order: even exactly the memory of another's source is too much.
        starts = [source.data_ptr() for source in sources.values()]
        if not any(out.data_ptr() in starts[:i] + starts[i + 1 :] for i, out in enumerate(outputs.values())):
            return
    for i, (name, out) in enumerate(outputs.items()):
        check_output(op, name, out, **sources, **others)
        apart = {n: sources[n] for n in source_names if n != source_names[i]}
        apart |= {n: outputs[n] for n in names[:i]}
        for other, value in apart.items():
            if out.numel() and value.numel() and (out.data_ptr() == value.data_ptr() or overlaps(out, value)):
                raise ArgumentValueError(op, name, f"memory apart from '{other}'", f"an overlap with '{other}'")
