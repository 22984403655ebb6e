"""add_relu on a GPU: every case on the Triton backend, and offsets that need 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, Case, add_relu, checks, normal

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("case", add_relu.CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    with onepass.backend("triton"):
        checks.check_case(add_relu, case.build(CUDA))


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    inputs = {"x": normal(CUDA, 257, 577, dtype=BF16)[:, 1:], "y": normal(CUDA, 257, 576, dtype=BF16, seed=1)}
    checks.check_batch_independence(add_relu, inputs)


def test_offsets_past_2_31() -> None:
    """N1, contiguous (one long row) and strided."""
    x = torch.full((524289, 4096), -1.0, dtype=BF16, device=CUDA)
    y = torch.full((524289, 4096), 3.0, dtype=BF16, device=CUDA)
    x[-1], y[0] = 2.0, -7.0
    onepass.add_relu(x, y, out=x)
    assert _all(x[0], 0.0)
    assert _all(x[-1], 5.0)
    assert all(_all(part, 2.0) for part in x[1:-1].split(2**16))
    left, right = y[:, :2048], y[:, 2048:]
    onepass.add_relu(left, x[:, :2048], out=right)
    assert _all(right[0], 0.0)
    assert _all(right[-1], 8.0)
    assert all(_all(part, 5.0) for part in right[1:-1].split(2**16))
    assert _all(left[-1], 3.0)


def _all(t: torch.Tensor, value: float) -> bool:
    return bool((t == value).all())


@pytest.mark.parametrize(
    "call", [*add_relu.overload_calls(CUDA)] if torch.cuda.is_available() else [], ids=lambda c: c[0]
)
def test_opcheck(call: tuple[str, Any, tuple[Any, ...]]) -> None:
    torch.library.opcheck(call[1], call[2])
