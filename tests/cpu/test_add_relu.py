"""add_relu on the CPU: every case on the reference and the CPU backend."""

from __future__ import annotations

import pytest
import torch
from cases import Case, add_relu, checks

import onepass

CPU = torch.device("cpu")


CASES = [case for case in add_relu.CASES if not case.gpu_only]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_case(backend: str, case: Case) -> None:
    with onepass.backend(backend):
        checks.check_case(add_relu, case.build(CPU))
