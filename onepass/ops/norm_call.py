"""What layer_norm and rms_norm share between their checks and their kernels: how the rows of a call lie in memory.

A norm takes x and perhaps a residual, [..., N] both, and parameters [N]; it writes y and, with a residual, the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from onepass import dispatch
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.rows import aligned_16, as_out_rows, as_rows, row_stride, strides_aligned_16


class RowStrides(NamedTuple):
    """Distance between rows in elements."""

    x: int
    residual: int
    y: int
    residual_out: int


def layout(
    x: Tensor, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None, **parameters: Tensor | None
) -> tuple[bool, tuple[str, ...]]:
    """Whether every pointer and row stride is a multiple of 16 bytes, and the names of what must be copied."""
    rows = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
    tensors = {**rows, **parameters}
    copied = tuple(name for name, t in tensors.items() if t is not None and row_stride(t) is None)
    strides = [row_stride(t) or 0 for name, t in rows.items() if t is not None and name not in copied]
    if copied or out is None or (residual is not None and residual_out is None):
        strides.append(x.shape[-1])  # copies and fresh outputs are contiguous
    in_place = (t for name, t in tensors.items() if name not in copied)
    return aligned_16(*in_place) and strides_aligned_16(x.element_size(), strides), copied


class NormPlans(Plans):
    """The plans of a norm. Its tensors are x, the residual or None, `parameters` more, then where they are given y and
    the sum or None.

    `check(x, residual, *parameters, *values, *outputs)` raises what is wrong with a call, `desc(x, residual,
    *parameters, *values, aligned)` gives its Desc. A backend's `run` gets the strides, those of `values` that
    `run_values` counts, and x, residual, *parameters, y, residual_out.
    """

    def __init__(
        self,
        op: str,
        parameters: int,
        run_values: tuple[int, ...],
        check: Callable[..., None],
        desc: Callable[..., NamedTuple],
    ) -> None:
        super().__init__(self._make_plan)
        self._op, self._inputs, self._run_values = op, 2 + parameters, run_values
        self._check, self._desc = check, desc

    def _make_plan(self, aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
        inputs, outputs = tensors[: self._inputs], tensors[self._inputs :]
        self._check(*inputs, *values, *outputs)
        x, residual = inputs[:2]
        assert x is not None
        if x.numel() == 0:
            return lambda *args: None
        if any(t is not None and row_stride(t) is None for t in tensors):
            return partial(self._run_on_copies, values)
        n = x.shape[-1]
        y, residual_out = (_stride(t) for t in outputs) if outputs else (n, 0 if residual is None else n)
        strides = RowStrides(_stride(x), _stride(residual), y, residual_out)
        aligned = aligned and strides_aligned_16(x.element_size(), strides)
        run = dispatch.prepare(self._op, self._desc(*inputs, *values, aligned))
        return partial(run, strides, *(values[i] for i in self._run_values))

    def _run_on_copies(self, values: tuple[Any, ...], *tensors: Tensor | None) -> None:
        """The slower path of rows.py."""
        inputs = tuple(None if t is None else as_rows(t) for t in tensors[: self._inputs])
        targets = tensors[self._inputs :]
        outputs = tuple(None if t is None else as_out_rows(t) for t in targets)
        self.find(values, (*inputs, *outputs))(*inputs, *outputs)
        for target, rows in zip(targets, outputs, strict=True):
            if target is not None and rows is not None and rows is not target:
                target.copy_(rows)


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else row_stride(t) or 0
