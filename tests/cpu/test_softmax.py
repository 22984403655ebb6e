"""softmax on the CPU: wrong arguments, temperatures, and what the CPU backend does in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP16, normal
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError
from onepass.launch import cpu, cpu_threads
from onepass.ops.softmax_cpu import BLOCK

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-number": (lambda: onepass.softmax(1.0), "'logits': expected a torch.Tensor, got float"),
    "logits-int": (lambda: onepass.softmax(_x().int()), "'logits': expected float32, bfloat16 or float16, got .*int32"),
    "temperature-text": (
        lambda: onepass.softmax(_x(), temperature="1"),
        "'temperature': expected a number, .* got str",
    ),
    "temperature-bool": (lambda: onepass.softmax(_x(), temperature=True), "'temperature': .* got bool"),
    "temperature-dtype": (
        lambda: onepass.softmax(_x(), temperature=torch.ones(4, dtype=BF16)),
        "'temperature': expected float32, got .*bfloat16",
    ),
    "out-dtype": (lambda: onepass.softmax(_x(), out=_x(dtype=FP16)), "'out': expected the dtype of logits, .*float16"),
    "out-number": (lambda: onepass.softmax(_x(), out=1), "'out': expected a torch.Tensor or None, got int"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-scalar": (lambda: onepass.softmax(torch.tensor(1.0)), "'logits': expected at least one dimension"),
    "temperature-negative": (
        lambda: onepass.softmax(_x(), temperature=-0.5),
        "'temperature': .* not negative, got -0.5",
    ),
    "temperature-nan": (lambda: onepass.softmax(_x(), temperature=float("nan")), "'temperature': .* got nan"),
    "temperature-inf": (lambda: onepass.softmax(_x(), temperature=float("inf")), "'temperature': .* got inf"),
    "temperature-shape": (
        lambda: onepass.softmax(_x(), temperature=torch.ones(4, 1)),
        r"'temperature': expected shape \[4\], one for each row of logits, got \[4, 1\]",
    ),
    "temperature-device": (
        lambda: onepass.softmax(_x(), temperature=torch.ones(4, device="meta")),
        "'temperature': expected the device of logits, cpu, got meta",
    ),
    "out-shape": (lambda: onepass.softmax(_x(), out=_x(32)), "'out': expected the shape of logits"),
    "out-expanded": (lambda: onepass.softmax(_x(), out=_x(1, 8).expand(4, 8)), "'out': .* do not share memory"),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"softmax: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"softmax: argument {message}"):
        call()


def test_overlapping_memory_is_refused_and_nothing_is_written() -> None:
    memory = torch.arange(64.0)
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'logits'"):
        onepass.softmax(memory[:32].view(4, 8), out=memory[1:33].view(4, 8))
    with pytest.raises(ArgumentValueError, match=r"'out': .* partial overlap with 'temperature'"):
        onepass.softmax(_x(), temperature=memory[3:7], out=memory[:32].view(4, 8))
    assert torch.equal(memory, torch.arange(64.0))


@pytest.mark.parametrize("argument", ["logits", "temperature", "out"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"logits": _x(), "temperature": torch.ones(4), "out": _x()}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.softmax"):
        onepass.softmax(**inputs)
    with torch.no_grad():
        onepass.softmax(**inputs)


def test_one_temperature_for_all_is_the_number() -> None:
    x = _x(5, 300, dtype=BF16)
    assert torch.equal(onepass.softmax(x, temperature=torch.full((5,), 0.7)), onepass.softmax(x, temperature=0.7))
    assert torch.equal(onepass.softmax(x, temperature=1), onepass.softmax(x))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_cold_rows_are_exact(dtype: torch.dtype) -> None:
    x = _x(6, 1000, dtype=dtype)
    expected = torch.nn.functional.one_hot(x.argmax(-1), 1000).to(dtype)
    assert torch.equal(onepass.softmax(x, temperature=0), expected)


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_a_maximum_in_any_block(n: int) -> None:
    """Each new maximum scales what was summed before it."""
    x = torch.linspace(-60.0, 60.0, n).repeat(3, 1)
    x[1] = x[1].flip(-1)
    x[2, n // 2] = 80.0
    torch.testing.assert_close(onepass.softmax(x), torch.softmax(x.double(), -1).float(), rtol=1e-5, atol=1e-37)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _x(50, 700, dtype=BF16)
    expected = onepass.softmax(x)
    monkeypatch.setattr(cpu_threads, "PARALLEL_ELEMENTS", 0)
    monkeypatch.setattr(cpu_threads, "_CHUNK_ELEMENTS", 2048)
    assert torch.equal(onepass.softmax(x), expected)


def test_explain_names_what_is_copied() -> None:
    notes = onepass.explain("softmax", _x(8, 8).t(), temperature=torch.ones(8)).notes
    assert notes[0].startswith("'logits' has no single row stride")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_stores_past_the_caches_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _x(3, 5000 // 64 * 64, dtype=dtype)
    x[2] = float("nan")
    temperature = torch.tensor([1.0, 0.0, 1.0])
    expected = onepass.softmax(x, temperature=temperature)
    monkeypatch.setattr(cpu, "_STREAMING_BYTES", 0)
    memory = torch.empty(x.numel() + 64, dtype=dtype)
    start = -memory.data_ptr() % 64 // memory.element_size()
    out = memory[start : start + x.numel()].view(x.shape)
    onepass.softmax(x, temperature=temperature, out=out)
    assert torch.equal(out.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("n", [100, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + n, dtype=BF16)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CPU, 3, n, dtype=BF16))
    expected = onepass.softmax(x.clone())
    assert torch.equal(onepass.softmax(x, out=x), expected)
    assert torch.equal(onepass.logsumexp(x), onepass.logsumexp(expected))
