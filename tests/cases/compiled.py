"""Functions that call the ops inside torch.compile, and what must hold for them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import onepass
from cases import BF16, checks, clone_inputs, normal
from cases.checks import as_tuple, assert_same_bits, call
from onepass.ops.spec import Inputs

N = 96


def norm_silu(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = onepass.layer_norm(x * 2, weight, bias, activation="silu")
    assert isinstance(y, Tensor)
    return (y + 1,)


def norm_residual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y, total = onepass.layer_norm(x, weight, bias, residual=residual)
    return y * 2, total


def norm_outputs(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y, total = torch.empty_like(x), torch.empty_like(x)
    onepass.layer_norm(x, weight, bias, residual=residual, out=y, residual_out=total)
    return y, total


def norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    onepass.layer_norm(x, weight, bias, residual=residual, out=x, residual_out=residual)
    onepass.layer_norm_silu(x, weight, bias, out=x)
    return x + 1, residual + 1


def add_relu_twice(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = onepass.add_relu(x, residual)
    onepass.add_relu(y, x, out=y)
    return (y,)


FUNCTIONS: tuple[Callable[..., tuple[Tensor, ...]], ...] = (
    norm_silu,
    norm_residual,
    norm_outputs,
    norm_in_place,
    add_relu_twice,
)


def check_compiled(
    function: Callable[..., tuple[Tensor, ...]], device: torch.device, backend: str, dynamic: bool | None
) -> None:
    """One graph, the bits of the uncompiled function (also in the inputs), and no graph for each batch size."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    batches = (3, 3) if dynamic is False else (3, 16, 17, 33)
    for num_tokens in batches:
        inputs = {
            "x": normal(device, 2, num_tokens, N, dtype=BF16, seed=num_tokens),
            "residual": normal(device, 2, num_tokens, N, dtype=BF16, seed=num_tokens + 1),
            "weight": normal(device, N, dtype=BF16, seed=2),
            "bias": normal(device, N, seed=3),
        }
        copies = clone_inputs(inputs)
        with torch.no_grad():
            expected = function(**copies)
            results = compiled(**inputs)
        assert_same_bits(results, expected, f"{function.__name__} compiled by {backend}, {num_tokens} tokens")
        assert_same_bits(tuple(inputs.values()), tuple(copies.values()), "inputs after the compiled call")
    # dynamic=None: the first batch size is taken as fixed, the second compiles for all.
    assert counters["stats"]["unique_graphs"] == (2 if dynamic is None else 1)


def check_op_compiled(table: ModuleType, inputs: Inputs, backend: str) -> None:
    """The op alone in a compiled function: one graph, and the bits of the uncompiled call."""
    torch._dynamo.reset()
    counters.clear()

    op = checks.function(table, inputs)

    def function(**inputs: Any) -> Any:
        return op(**inputs)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with torch.no_grad():
        results = compiled(**clone_inputs(inputs))
        assert_same_bits(as_tuple(results), call(table, clone_inputs(inputs)), f"{table.SPEC.op} compiled by {backend}")
    assert counters["stats"]["unique_graphs"] == 1
