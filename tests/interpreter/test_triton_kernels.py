"""The Triton backend's results without a GPU: every case of every op, in Triton's interpreter."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import BF16, FP32, Case, checks, layer_norm, normal, rms_norm, tables

import onepass
from onepass.ops.row_config import MAX_RESIDENT

CPU = torch.device("cpu")
CASES = [
    pytest.param(table, case, id=f"{table.SPEC.op}-{case.name}")
    for table in tables("triton")
    for case in table.CASES
    if not case.many_programs and not case.gpu_only
]


@triton.jit
def _count(out_ptr, n):  # type: ignore[no-untyped-def]
    total = 0
    for _ in tl.range(0, n):
        total += 1
    tl.store(out_ptr, total)


@cache
def _loops_run() -> bool:
    out = torch.zeros(1, dtype=torch.int32)
    try:
        _count[(1,)](out, 3)
    except Exception as error:
        # Triton 3.6 takes int() of an array of one element, which NumPy 2.4 no longer allows.
        if "only 0-dimensional arrays" not in str(error):
            raise
        return False
    return int(out) == 3


def _skip_long_rows(n: int) -> None:
    """Rows too long for registers need a loop in the kernel."""
    if n > MAX_RESIDENT:
        _skip_loops()


def _skip_loops() -> None:
    if not _loops_run():
        pytest.skip(f"the interpreter of Triton {triton.__version__} runs no loops with NumPy {np.__version__}")


@pytest.mark.parametrize(("table", "case"), CASES)
def test_case(table: ModuleType, case: Case) -> None:
    if table in (layer_norm, rms_norm):
        _skip_long_rows(case.build(CPU)["x"].shape[-1])
    if getattr(table, "LOOPS", False):
        _skip_loops()
    with onepass.backend("triton"):
        checks.check_case_in_few_calls(table, case.build(CPU))


@pytest.mark.parametrize(("n", "dtype"), [(1, BF16), (17, BF16), (576, BF16), (576, FP32), (16392, BF16)])
def test_a_row_has_the_same_bits_in_every_batch(n: int, dtype: torch.dtype) -> None:
    _skip_long_rows(n)
    inputs = {"x": normal(CPU, 18, n, dtype=dtype), **layer_norm.params(CPU, n, dtype, dtype)}
    checks.check_batch_independence(layer_norm, inputs)


@pytest.mark.parametrize("n", [576, 16385])
def test_largest_constant_rows(n: int) -> None:
    _skip_long_rows(n)
    layer_norm.check_largest_constant_rows(CPU, n)


@pytest.mark.parametrize("n", [576, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    _skip_long_rows(n)
    memory = torch.empty(2**31 + n, dtype=BF16)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CPU, 3, n, dtype=BF16))
    inputs = {"x": x.clone(), **layer_norm.params(CPU, n, BF16, BF16)}
    results = checks.call(layer_norm, {**inputs, "x": x}, out=x)
    checks.check_values(layer_norm, inputs, tuple(result.contiguous() for result in results))


def test_explain_says_that_triton_runs() -> None:
    assert onepass.explain("layer_norm", normal(CPU, 2, 8)).backend == "triton"
