"""What must hold for every op on a CPU: every case on two backends, torch.library, torch.compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case, checks, tables
from cases.compiled import check_op_compiled

import onepass

CPU = torch.device("cpu")
CASES = [
    pytest.param(table, backend, case, id=f"{table.SPEC.op}-{backend}-{case.name}")
    for backend in ("reference", "cpu")
    for table in tables(backend)
    for case in table.CASES
    if not case.gpu_only
]
BATCHES = [
    pytest.param(table, inputs, id=f"{table.SPEC.op}-{i}")
    for table in tables("cpu")
    for i, inputs in enumerate(table.batches(CPU))
]
OVERLOADS = [
    pytest.param(overload, args, id=name)
    for table in tables("cpu")
    for name, overload, args in table.overload_calls(CPU)
]
EVERY_OP = pytest.mark.parametrize("table", tables("cpu"), ids=lambda table: table.SPEC.op)


@pytest.mark.parametrize(("table", "backend", "case"), CASES)
def test_case(table: ModuleType, backend: str, case: Case) -> None:
    with onepass.backend(backend):
        checks.check_case(table, case.build(CPU))


@pytest.mark.parametrize(("table", "inputs"), BATCHES)
def test_a_row_has_the_same_bits_in_every_batch(table: ModuleType, inputs: dict[str, Any]) -> None:
    with onepass.backend("cpu"):
        checks.check_batch_independence(table, inputs)


@pytest.mark.parametrize(("overload", "args"), OVERLOADS)
def test_opcheck(overload: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(overload, args)


@EVERY_OP
def test_compiled_as_one_graph(table: ModuleType) -> None:
    check_op_compiled(table, next(table.batches(CPU)), "aot_eager")


@EVERY_OP
def test_explain_names_the_cpu_backend(table: ModuleType) -> None:
    assert onepass.explain(table.SPEC.op, **next(table.batches(CPU))).backend == "cpu"
