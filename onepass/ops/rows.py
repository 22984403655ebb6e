"""Tensors seen as rows: [..., N] as [num_rows, N] with one row stride and no copy, where memory allows it.

Kernels take a base pointer and a row stride. A tensor whose last dimension is not contiguous, or whose leading
dimensions do not collapse into one stride, takes the one slower path: inputs are copied to contiguous memory
first, outputs are computed in contiguous memory and copied back. `explain()` says when that happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import torch

from onepass.errors import ArgumentValueError


def row_stride(t: torch.Tensor) -> int | None:
    """The distance between rows in elements, or None where no single stride gives the rows."""
    if t.is_contiguous():
        return t.shape[-1] if t.ndim else 1
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        return None
    # Leading dimensions of size 1 say nothing about memory; the others must nest without gaps.
    leading = [(size, stride) for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size != 1]
    if not leading:
        return t.shape[-1]
    for (_, outer), (size, inner) in itertools.pairwise(leading):
        if outer != size * inner:
            return None
    return leading[-1][1]


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a contiguous copy where it has no single row stride."""
    return t if row_stride(t) is not None else t.contiguous()


def as_out_rows(t: torch.Tensor) -> torch.Tensor:
    """`t`, or contiguous memory of its shape where it has no single row stride."""
    return t if row_stride(t) is not None else contiguous_like(t)


def contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """Fresh contiguous memory of x's shape, dtype and device."""
    # empty_like keeps the strides of a dense tensor, so it is contiguous when x is, and cheaper without the argument.
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def aligned_16(*tensors: torch.Tensor | None) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return not bits & 15


def strides_aligned_16(element_size: int, strides: Iterable[int]) -> bool:
    """Whether every row stride, given in elements, is a multiple of 16 bytes."""
    return all(stride * element_size % 16 == 0 for stride in strides)


def copy_notes(copied: tuple[str, ...], aligned: bool) -> tuple[str, ...]:
    """What `explain()` says of the slower paths a call takes."""
    notes = [f"'{name}' has no single row stride and is copied to or from contiguous memory" for name in copied]
    if not aligned:
        notes.append("a pointer or a row stride is not a multiple of 16 bytes: narrower memory accesses")
    return tuple(notes)


def _byte_view(t: torch.Tensor) -> np.ndarray:
    """A NumPy array over the same addresses. It is never read: only its extents are compared."""

    interface = {
        "version": 3,
        "typestr": f"|V{t.element_size()}",
        "shape": tuple(t.shape),
        "strides": tuple(s * t.element_size() for s in t.stride()),
        "data": (t.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that `t` touches (strides are never negative in torch)."""
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` and `b` are exactly the same view. The stride of a dimension of size 1 says nothing."""
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(size == 1 or s == t for size, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any element of `a` shares memory with an element of `b`; False when they are exactly the same view."""
    if a.numel() == 0 or b.numel() == 0 or _same_elements(a, b):
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a), _extent(b)
    if a_end <= b_first or b_end <= a_first or _side_by_side(a, b):
        return False
    try:
        return bool(np.shares_memory(_byte_view(a), _byte_view(b), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _side_by_side(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both step by the same stride and share no byte of a step, as slices of one buffer's rows do."""
    if a.ndim < 2 or b.ndim < 2:
        return False
    step = a.stride(0) * a.element_size()
    if step == 0 or step != b.stride(0) * b.element_size():
        return False
    (a_first, a_end), (b_first, b_end) = _extent(a[0]), _extent(b[0])
    distance = (b_first - a_first) % step
    return a_end - a_first <= distance and distance + b_end - b_first <= step


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Whether elements of `t` may share memory: its dimensions, smallest stride first, do not nest."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_outputs(op: str, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor | None) -> None:
    """`check_output` for each of the outputs, which must also lie apart from each other.

    Raises:
        ArgumentValueError: as `check_output`, or two outputs share memory.
    """
    if clearly_apart(tuple(outputs.values()), tuple(inputs.values())):
        return
    names = list(outputs)
    for i, (name, out) in enumerate(outputs.items()):
        check_output(op, name, out, **inputs)
        for other in names[:i]:
            if out.numel() and (out.data_ptr() == outputs[other].data_ptr() or overlaps(out, outputs[other])):
                raise ArgumentValueError(op, name, f"memory apart from '{other}'", f"an overlap with '{other}'")


def clearly_apart(outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether extents show at once that contiguous outputs are apart from each other, and from each input or it."""
    taken: list[tuple[int, int, torch.Tensor]] = []
    for out in outputs:
        if not out.is_contiguous():
            return False
        first = out.data_ptr()
        end = first + out.nbytes
        for other_first, other_end, _ in taken:
            if first < other_end and other_first < end:
                return False
        taken.append((first, end, out))
    for value in inputs:
        if value is None:
            continue
        first, end = _extent(value)
        for other_first, other_end, out in taken:
            if first < other_end and other_first < end and value is not out and not _same_elements(value, out):
                return False
    return True


def check_output(op: str, argument: str, out: torch.Tensor, /, **inputs: torch.Tensor | None) -> None:
    """Each element of `out` has memory of its own, shared with an input only if it is exactly that input.

    Raises:
        ArgumentValueError: `out` overlaps itself (an expanded tensor, sliding windows) or a part of an input.
    """
    if not out.is_contiguous() and _overlaps_itself(out):
        got = f"shape {list(out.shape)} with strides {list(out.stride())}"
        raise ArgumentValueError(op, argument, "a tensor whose elements do not share memory", got)
    first, end = _extent(out)
    for name, value in inputs.items():
        if value is None or value.data_ptr() >= end:
            continue
        if _extent(value)[1] > first and overlaps(out, value):
            raise ArgumentValueError(
                op, argument, f"memory apart from '{name}', or exactly '{name}'", f"a partial overlap with '{name}'"
            )
