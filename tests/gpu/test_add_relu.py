"""add_relu on a GPU: offsets that need 64 bits."""

from __future__ import annotations

import pytest
import torch
from cases import BF16

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


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
