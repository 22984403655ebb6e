"""The Triton backend's results without a GPU: every case of every op, in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from cases import BF16, FP32, Case, add_relu, checks, layer_norm, normal

import onepass

CPU = torch.device("cpu")
CASES = [
    pytest.param(table, case, id=f"{table.SPEC.op}-{case.name}")
    for table in (layer_norm, add_relu)
    for case in table.CASES
    if not case.many_programs
]


@pytest.mark.parametrize(("table", "case"), CASES)
def test_case(table: ModuleType, case: Case) -> None:
    with onepass.backend("triton"):
        checks.check_case_in_few_calls(table, case.build(CPU))


@pytest.mark.parametrize(("n", "dtype"), [(1, BF16), (17, BF16), (576, BF16), (576, FP32), (16392, BF16)])
def test_a_row_has_the_same_bits_in_every_batch(n: int, dtype: torch.dtype) -> None:
    inputs = {"x": normal(CPU, 18, n, dtype=dtype), **layer_norm.params(CPU, n, dtype, dtype)}
    checks.check_batch_independence(layer_norm, inputs)


@pytest.mark.parametrize("n", [576, 16385])
def test_largest_constant_rows(n: int) -> None:
    layer_norm.check_largest_constant_rows(CPU, n)


@pytest.mark.parametrize("n", [576, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + n, dtype=BF16)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CPU, 3, n, dtype=BF16))
    inputs = {"x": x.clone(), **layer_norm.params(CPU, n, BF16, BF16)}
    results = checks.call(layer_norm, {**inputs, "x": x}, out=x)
    checks.check_values(layer_norm, inputs, tuple(result.contiguous() for result in results))


def test_explain_says_that_triton_runs() -> None:
    assert onepass.explain("layer_norm", normal(CPU, 2, 8)).backend == "triton"
