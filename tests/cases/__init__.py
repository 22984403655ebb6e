"""Tables of inputs, one module an op; the same tables feed the CPU tests, the interpreter and the GPU tests.

A table's module is named as its op and holds

- `SPEC`, the op's spec, and `CASES`;
- what `checks.py` needs to judge a result: `outputs(inputs)`, `truths(inputs)`, `eager(inputs)`,
  `in_place_forms(inputs)`, and `row_inputs(inputs)` where the tensors with a batch's rows are not just those of the
  first one's shape;
- `function(inputs)`, where an op has several public functions: the one that takes these inputs;
- `LOOPS = True`, where all cases run a loop of the Triton kernel: some versions' interpreters cannot;
- `VIEWS`, where there are results that may be views of an input: their output arguments;
- `batches(device)`: inputs of 18 rows and more, whose rows must not depend on each other; with `batch_class(num_rows)`
  only within batches of one class;
- `overload_calls(device)`: every registered overload with arguments, for opcheck;
- `COMPILED`: the kernels that `test_triton_compile.py` compiles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import TABLE
from onepass.ops.spec import Inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A named input. `build(device)` gives the keyword arguments of the public op, the same values each time."""

    name: str
    build: Callable[[torch.device], Inputs]
    many_programs: bool = False
    """Too many rows for Triton's interpreter, which takes about a millisecond a program."""
    gpu_only: bool = False
    """Too large for a CPU."""


def tables(backend: str) -> list[ModuleType]:
    """The tables of the ops that have this backend."""
    return [importlib.import_module(f"cases.{op}") for op, backends in TABLE.items() if backend in backends]


def normal(
    device: torch.device,
    *shape: int,
    dtype: torch.dtype = FP32,
    scale: float = 1.0,
    base: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Random values around `base`, drawn on the CPU so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=FP32, generator=generator)
    return (base + scale * values).to(device=device, dtype=dtype)


def clone_inputs(inputs: Inputs) -> Inputs:
    """A copy with the same strides, storage offsets and shared storages; the bytes around a view are copied too."""
    storages: dict[int, Tensor] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = value.untyped_storage().data_ptr() if value.numel() else id(value)
        if key not in storages:
            storages[key] = whole_storage(value).clone()
        return storages[key].as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: clone(value) for name, value in inputs.items()}


def whole_storage(t: Tensor) -> Tensor:
    """Every element of the memory that `t` is a view of, as one vector."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def footprint(t: Tensor) -> Tensor:
    """A bool for each element of `t`'s storage: whether `t` covers it."""
    covered = torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=torch.bool, device=t.device)
    covered.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
    return covered


def bits(t: Tensor) -> Tensor:
    """The values as integers, so that NaN equals NaN and 0 differs from -0."""
    return t.contiguous().view(_INTEGERS[t.element_size()])


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

# A NaN with a payload that no arithmetic produces; as an integer, a number that no result has.
_POISON = {8: 0x7FD5123456789ABC, 4: 0x7FD51234, 2: 0x7FD5, 1: 0x5D}


def poison(t: Tensor) -> None:
    """Fill with a NaN that can be told from every other."""
    t.view(_INTEGERS[t.element_size()]).fill_(_POISON[t.element_size()])


def poisoned(t: Tensor) -> Tensor:
    """Where the poison of `poison` still stands."""
    return bits(t) == _POISON[t.element_size()]


def poisoned_rows(like: Tensor) -> tuple[Tensor, Tensor]:
    """An output for `like` in the middle of poisoned memory: (the whole memory [rows, columns], the output).

    Rows are padded by a multiple of 16 bytes, so the output is as aligned as a contiguous one.
    """
    n = like.shape[-1] if like.ndim else 1
    rows = like.numel() // n if n else 0
    memory = torch.empty(rows + 2, n + 64 // like.element_size(), dtype=like.dtype, device=like.device)
    poison(memory)
    return memory, memory[1 : rows + 1, :n].view(like.shape)
