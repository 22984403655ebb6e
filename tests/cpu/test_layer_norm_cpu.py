"""layer_norm on the CPU backend: accuracy, one order of sums whatever the call, outputs in place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import onepass
from onepass.launch import cpu, cpu_threads
from onepass.ops.accuracy import compare
from onepass.ops.activations import ACTIVATIONS
from onepass.ops.layer_norm import kernel_cpu
from onepass.ops.layer_norm.op import describe
from onepass.ops.layer_norm.op import layer_norm as typed_layer_norm
from onepass.ops.layer_norm.reference import layer_norm as reference
from onepass.ops.layer_norm.spec import SPEC, unfused
from onepass.ops.spec import upcast

# Its result is a tensor or a pair, which tests know from what they pass.
layer_norm: Any = typed_layer_norm
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def on_cpu_backend() -> Iterator[None]:
    with onepass.backend("cpu"):
        yield


def inputs(shape: tuple[int, ...], dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {**SPEC.make_inputs(shape, dtype, torch.device("cpu"), 1), **more}


def check(arguments: dict[str, Any]) -> None:
    got, eager = layer_norm(**arguments), unfused(**arguments)
    exact: Any = upcast(arguments)
    if isinstance(got, tuple):
        assert torch.equal(got[1], eager[1])
        got, eager = got[0], eager[0]
        exact["x"] = (arguments["x"] + exact.pop("residual").to(arguments["x"].dtype)).double()
    truth = reference(**exact)
    assert isinstance(truth, torch.Tensor)
    accuracy = compare(got, eager, truth)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 769, 2048, 2049, 4096, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype: torch.dtype, n: int) -> None:
    check(inputs((3, n), dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_with_a_residual(dtype: torch.dtype, activation: str | None) -> None:
    arguments = inputs((5, 300), dtype, activation=activation)
    check({**arguments, "residual": torch.randn(5, 300).to(dtype)})


@pytest.mark.parametrize(
    ("weight_dtype", "bias_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float16), (None, torch.float32), (torch.float16, None)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_of_weight_and_bias(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> None:
    n = 333
    arguments = inputs((4, n), dtype)
    weight = None if weight_dtype is None else torch.randn(n).to(weight_dtype)
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    got = layer_norm(arguments["x"], weight, bias, activation="silu")
    want = reference(
        arguments["x"].double(),
        None if weight is None else weight.double(),
        None if bias is None else bias.double(),
        activation="silu",
    )
    assert isinstance(want, torch.Tensor)
    torch.testing.assert_close(got, want.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("base", [1e2, 1e6, -1e6])
@pytest.mark.parametrize("n", [16, 100, 4096, 151936])
def test_a_small_spread_around_a_large_mean(n: int, base: float) -> None:
    steps = torch.arange(n) % 16
    x = (base + steps * (1e-3 if base == 1e2 else 0.0625)).float().repeat(2, 1)
    got = layer_norm(x)
    want = reference(x.double())
    assert isinstance(want, torch.Tensor)
    # Not only no worse than eager: the mean is kept to more digits than float32 has.
    assert (got - want).abs().max() < 1e-5
    check({"x": x})


def test_an_outlier_does_not_hide_the_rest() -> None:
    x = torch.randn(2, 4096)
    x[:, 0] = 1e6
    check({"x": x})


def test_the_largest_numbers_do_not_overflow() -> None:
    x = torch.full((2, 5000), 3e38)
    assert torch.equal(layer_norm(x, bias=torch.ones(5000)), torch.ones(2, 5000))
    check({"x": torch.full((1, 8), 300.0, dtype=torch.float16)})


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x = torch.randn(4, 100)
    clean = layer_norm(x)
    x[1, 7], x[2, 99] = float("nan"), float("inf")
    got = layer_norm(x)
    assert got[1:3].isnan().all()
    assert torch.equal(got[::3], clean[::3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_depend_on_nothing_around_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 4000
    arguments = inputs((61, n), dtype)
    x = arguments.pop("x")
    want = layer_norm(x, **arguments)
    for row in (0, 17, 60):
        assert torch.equal(layer_norm(x[row], **arguments), want[row])
    # Not aligned, rows apart, and any address of the output.
    wide = torch.zeros(61, n + 7, dtype=dtype)
    wide[:, 3:-4] = x
    out = torch.zeros(61, n + 3, dtype=dtype)
    layer_norm(wide[:, 3:-4], **arguments, out=out[:, 1:-2])
    assert torch.equal(out[:, 1:-2], want)
    assert not out[:, :1].any()
    assert not out[:, -2:].any()
    # Output past the caches.
    monkeypatch.setattr(cpu, "_STREAMING_BYTES", 0)
    assert cpu.streams(x, n)
    assert torch.equal(layer_norm(x, **arguments), want)
    # Any number of threads.
    monkeypatch.setattr(cpu_threads, "PARALLEL_ELEMENTS", 0)
    monkeypatch.setattr(cpu_threads, "_CHUNK_ELEMENTS", 3 * n)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(layer_norm(x, **arguments), want)
    finally:
        torch.set_num_threads(before)
    # In place.
    assert torch.equal(layer_norm(x, **arguments, out=x), want)
    assert torch.equal(x, want)


@pytest.mark.parametrize("n", [100, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("y_is", "sum_is"), [("x", None), ("residual", "x"), ("x", "residual"), (None, "x")])
def test_outputs_may_be_inputs(dtype: torch.dtype, n: int, y_is: str | None, sum_is: str | None) -> None:
    arguments = inputs((9, n), dtype, residual=torch.randn(9, n).to(dtype))
    y, total = layer_norm(**arguments)
    out = arguments[y_is] if y_is else torch.empty_like(y)
    residual_out = arguments[sum_is] if sum_is else torch.empty_like(y)
    layer_norm(**arguments, out=out, residual_out=residual_out)
    assert torch.equal(out, y)
    assert torch.equal(residual_out, total)


def test_refuses_other_devices() -> None:
    x = torch.empty(2, 8, device="meta")
    (reason,) = kernel_cpu.unsupported_reasons(describe(x))
    assert "'meta'" in reason


def test_a_small_call_is_quick() -> None:
    x, weight, bias = torch.randn(1, 4096), torch.ones(4096), torch.zeros(4096)
    out = torch.empty_like(x)
    for _ in range(20):
        layer_norm(x, weight, bias, out=out)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        layer_norm(x, weight, bias, out=out)
        times.append(time.perf_counter() - start)
    # About 12 µs; the bound allows for a slow and busy machine.
    assert min(times) < 100e-6
