"""Gated activations on a GPU: what tests/gpu/test_ops.py does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, checks, gated_activation, normal

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def test_batch_sizes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """N15: one kernel serves every batch size."""
    from triton.compiler import CompiledKernel

    x = normal(CUDA, 5000, 1152, dtype=BF16)
    onepass.silu_and_mul(x[:2])
    created = []
    original = CompiledKernel.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledKernel, "__init__", counting)
    for num_tokens in (1, 3, 16, 17, 32, 1024, 5000):
        onepass.silu_and_mul(x[:num_tokens])
    assert not created


def test_offsets_past_2_31() -> None:
    """N1: 524289 rows of 8192, packed; their halves as two strided tensors, written over one of them."""
    num_rows = 524289
    x = torch.randn(1024, 8192, device=CUDA).to(BF16).repeat(num_rows // 1024 + 1, 1)[:num_rows]
    x[-1] = normal(CUDA, 8192, dtype=BF16)
    some = torch.tensor([0, 5, 262143, 262144, num_rows - 2, num_rows - 1], device=CUDA)
    inputs = {"x": x[some]}
    out = onepass.silu_and_mul(x)
    checks.check_values(gated_activation, inputs, (out[some],))
    gate, up = x.chunk(2, -1)
    onepass.swiglu(gate, up, out=up)
    assert torch.equal(up[some], out[some])
    assert torch.equal(up[::4099], out[::4099])


def test_one_row_of_more_than_2_31_columns() -> None:
    """N1: contiguous tensors of their own are one long row."""
    gate = torch.ones(2**31 + 2048 * 3 + 5, dtype=BF16, device=CUDA)
    gate[-1] = -2.0
    up = gate.clone()
    onepass.geglu(gate, up, out=up)
    expected = onepass.geglu(torch.tensor([1.0, -2.0], device=CUDA).to(BF16), gate[-2:])
    assert torch.equal(up[-2:], expected)
    assert bool((up[:-1] == expected[0]).all())
