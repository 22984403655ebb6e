"""add_relu on the CPU backend: equal to torch bit for bit, in tiles of any cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import onepass
from onepass.launch import cpu, cpu_threads
from onepass.ops.add_relu import kernel_cpu
from onepass.ops.add_relu.op import add_relu, describe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def on_cpu_backend() -> Iterator[None]:
    with onepass.backend("cpu"):
        yield


def special(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers with NaN, infinities, zeros of both signs and subnormal numbers among them."""
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    tiny = torch.finfo(dtype).tiny / 4
    inf = float("inf")
    pool = torch.tensor([float("nan"), inf, -inf, 0.0, -0.0, tiny, -tiny], dtype=dtype)
    x.view(-1)[::11] = pool[torch.arange(x.view(-1)[::11].numel()) % 7]
    y.view(-1)[::13] = pool[torch.arange(y.view(-1)[::13].numel()) % 7]
    return x, y


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 17), (2, 8192), (1, 3 * 8192 + 5), (5, 9001), (37, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, y = special(shape, dtype)
    want = torch.relu(x + y)
    assert equal(add_relu(x, y), want)
    assert equal(add_relu(x, y, out=y), want)


@pytest.mark.parametrize("n", [1, 30, 8193, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_and_not_aligned(dtype: torch.dtype, n: int) -> None:
    x, y = special((6, n + 3), dtype)
    out = torch.full((6, n + 5), 9.0, dtype=dtype)
    add_relu(x[:, 1:-2], y[:, 2:-1], out=out[:, 3:-2])
    assert equal(out[:, 3:-2], torch.relu(x[:, 1:-2] + y[:, 2:-1]))
    assert (out[:, :3] == 9).all()
    assert (out[:, -2:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_stores_past_the_caches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_STREAMING_BYTES", 0)
    monkeypatch.setattr(cpu_threads, "PARALLEL_ELEMENTS", 0)
    monkeypatch.setattr(cpu_threads, "_CHUNK_ELEMENTS", 8192)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for shape in ((200_003,), (50, 4096)):
                x, y = special(shape, dtype)
                assert equal(add_relu(x, y), torch.relu(x + y))
    finally:
        torch.set_num_threads(before)


def test_refuses_other_devices() -> None:
    x = torch.empty(2, 8, device="meta")
    (reason,) = kernel_cpu.unsupported_reasons(describe(x, x))
    assert "'meta'" in reason
