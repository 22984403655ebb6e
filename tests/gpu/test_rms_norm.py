"""rms_norm on a GPU: what tests/gpu/test_ops.py does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, checks, normal, rms_norm
from torch import Tensor

import onepass
from onepass.ops.accuracy import compare
from onepass.ops.spec import Inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def test_batch_sizes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """N15: one kernel serves every batch size up to many rows, divisible by 16 or not."""
    from triton.compiler import CompiledKernel

    x, weight = normal(CUDA, 256, 576, dtype=BF16), rms_norm.weight_of(CUDA, 576, BF16)
    onepass.rms_norm(x[:2], weight)
    onepass.fused_add_rms_norm(x[:2], x[:2], weight)
    created = []
    original = CompiledKernel.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledKernel, "__init__", counting)
    for num_tokens in (1, 3, 16, 17, 32, 255, 256):
        onepass.rms_norm(x[:num_tokens], weight)
        onepass.fused_add_rms_norm(x[:num_tokens], x[:num_tokens], weight)
    assert not created


def test_offsets_past_2_31() -> None:
    """N1: 524289 rows of 4096."""
    x, residual = _large(524289, 4096), _large(524289, 4096, seed=1)
    some = _some(x)
    inputs: Inputs = {"x": x[some], "weight": rms_norm.weight_of(CUDA, 4096, BF16), "residual": residual[some]}
    onepass.fused_add_rms_norm_(x, residual, inputs["weight"])
    checks.check_values(rms_norm, inputs, (x[some], residual[some]))


def test_strided_offsets_past_2_31() -> None:
    """N1: rows x stride past 2^31, written beside the input in the same memory."""
    memory = _large(262145, 8192)
    x, out = memory[:, :4096], memory[:, 4096:]
    some = _some(x)
    inputs: Inputs = {"x": x[some], "weight": rms_norm.weight_of(CUDA, 4096, BF16)}
    onepass.rms_norm(x, inputs["weight"], out=out)
    checks.check_values(rms_norm, inputs, (out[some],))
    assert torch.equal(x[some], inputs["x"])


def test_long_rows_with_offsets_past_2_31() -> None:
    x = _large(65537, 32776)
    some = _some(x)
    inputs: Inputs = {"x": x[some], "weight": rms_norm.weight_of(CUDA, 32776, BF16)}
    onepass.rms_norm(x, inputs["weight"], out=x)
    checks.check_values(rms_norm, inputs, (x[some],))


def test_a_row_longer_than_2_31() -> None:
    """Any N: columns are not counted in 32 bits."""
    n = 2**31 + 24
    x = _large(1, n)
    ends = (slice(0, 4096), slice(n - 4096, n))
    kept = [x[:, end].double() for end in ends]
    mean_square = sum(float(c.double().square().sum()) for c in x.split(2**27, dim=1)) / n
    y = onepass.rms_norm(x, out=x)
    for end, values in zip(ends, kept, strict=True):
        truth = values * (mean_square + 1e-6) ** -0.5
        accuracy = compare(y[:, end], truth.to(BF16), truth)
        assert accuracy.ok, accuracy


def test_more_rows_than_2_31() -> None:
    n = 2**31 + 3
    x = torch.full((n, 1), 2.0, dtype=BF16, device=CUDA)
    onepass.rms_norm(x, torch.full((1,), 0.5, dtype=BF16, device=CUDA), out=x)
    assert all(bool((part == 0.5).all()) for part in x.split(2**28))


def _large(rows: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    memory = torch.empty(rows, n, dtype=BF16, device=CUDA)
    for part in memory.view(-1).split(2**28):
        part.normal_(generator=generator)
    return memory


def _some(x: Tensor) -> Tensor:
    """Rows at both ends, and around the middle, where 31 bits end for bytes."""
    rows = x.shape[0]
    return torch.tensor([0, 1, rows // 2 - 1, rows // 2, rows // 2 + 1, *range(rows - 16, rows)], device=CUDA)
