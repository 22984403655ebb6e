"""What an op tells benchmarks, studies and tests about itself: `ops/<op>/spec.py` holds one `OpSpec` as `SPEC`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses import FakeTensorMode

Inputs = dict[str, Any]
"""Keyword arguments of the public op, without `out`."""


@dataclass(frozen=True)
class OpSpec:
    """Everything the benchmark core needs to know of an op.

    `shapes` are the sizes of its sweep, `cpu_shapes` those on a CPU where it takes others.
    `make_inputs(shape, dtype, device, seed)` draws random inputs for one. `fused(**inputs)` is the public op,
    `unfused(**inputs)` the same in plain torch ops, one kernel a step, and `reference(**inputs)` what is run in float64
    for the truth. `allocate_out(inputs)` gives the keyword arguments of the out-form. `bytes_moved` and `flops` count
    what one call must move and compute; `unfused_bytes` and `unfused_launches` count the same for the unfused ops.

    The rows of a result must not depend on each other: of tensors too large for float64 copies, benchmarks run the
    reference on some rows alone. `row_inputs` names the inputs whose first dimension is the rows, as it is that of each
    result; without it rows are the last dimension, of all tensors with the leading dimensions of the largest.

    `ceiling` is what the sizes are held against: "copy", as many bytes read and written, half each; or "read", as many
    bytes read, for an op that reads much more than it writes.

    `fault(inputs, result)` is for results that are drawn at random, which no reference can foretell: what is wrong
    with one, or nothing ("").

    `form_inputs` is `make_inputs` for the op's other public functions that take other tensors, by name.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    make_inputs: Callable[[tuple[int, ...], torch.dtype, torch.device, int], Inputs]
    fused: Callable[..., Any]
    unfused: Callable[..., Any]
    reference: Callable[..., Any]
    allocate_out: Callable[[Inputs], Inputs]
    bytes_moved: Callable[[Inputs], int]
    unfused_bytes: Callable[[Inputs], int]
    unfused_launches: int
    flops: Callable[[Inputs], int]
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.float32, torch.bfloat16, torch.float16))
    cpu_shapes: tuple[tuple[int, ...], ...] = ()
    row_inputs: tuple[str, ...] = ()
    ceiling: Literal["copy", "read"] = "copy"
    fault: Callable[[Inputs, Any], str] | None = None
    form_inputs: dict[str, Callable[[tuple[int, ...], torch.dtype, torch.device, int], Inputs]] = field(
        default_factory=dict
    )


def load(op: str) -> OpSpec:
    """The spec of an op of `onepass.dispatch.TABLE`."""
    return importlib.import_module(f"onepass.ops.{op}.spec").SPEC


def smallest_shape(spec: OpSpec) -> tuple[int, ...]:
    """The size of an op's sweeps whose inputs take the least memory."""

    def input_bytes(shape: tuple[int, ...]) -> int:
        inputs = spec.make_inputs(shape, torch.float32, torch.device("cpu"), 0)
        return tensor_bytes(*(t for t in inputs.values() if isinstance(t, torch.Tensor)))

    with FakeTensorMode():
        return min((*spec.cpu_shapes, *spec.shapes), key=input_bytes)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all elements of the given tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def upcast(inputs: Inputs) -> Inputs:
    """The same inputs with every floating-point tensor in float64."""
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
