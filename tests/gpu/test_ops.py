"""What must hold for every op on a GPU: every case in Triton, torch.library, torch.compile, CUDA graphs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from cases import Case, checks, tables
from cases.compiled import check_op_compiled

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
CASES = [
    pytest.param(table, backend, case, id=f"{table.SPEC.op}-{backend}-{case.name}")
    for backend in ("triton", "cuda")
    for table in tables(backend)
    for case in table.CASES
]
EVERY_OP = pytest.mark.parametrize("table", tables("triton"), ids=lambda table: table.SPEC.op)


@pytest.mark.parametrize(("table", "backend", "case"), CASES)
def test_case(table: ModuleType, backend: str, case: Case) -> None:
    inputs = case.build(CUDA)
    op = table.function(inputs) if hasattr(table, "function") else table.SPEC.op
    with onepass.backend(backend):
        if onepass.explain(op, **inputs).backend != backend:
            pytest.skip(f"not a case that {backend} takes")
        checks.check_case(table, inputs)


@EVERY_OP
def test_a_row_has_the_same_bits_in_every_batch(table: ModuleType) -> None:
    for inputs in table.batches(CUDA):
        checks.check_batch_independence(table, inputs)


@EVERY_OP
def test_opcheck(table: ModuleType) -> None:
    for _, overload, args in table.overload_calls(CUDA):
        torch.library.opcheck(overload, args)


@EVERY_OP
def test_compiled_as_one_graph(table: ModuleType) -> None:
    check_op_compiled(table, next(table.batches(CUDA)), "inductor")


@EVERY_OP
def test_captured_in_a_cuda_graph(table: ModuleType) -> None:
    """N16: the first call happens while a graph is captured; the replay reads new values in the same memory."""
    for inputs in table.batches(CUDA):
        checks.check_captured(table, inputs)
