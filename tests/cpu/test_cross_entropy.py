"""cross_entropy on the CPU: against torch, wrong arguments, explain and warmup."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, FP32, normal
from cases.cross_entropy import targets
from torch import Tensor
from torch.nn import functional as F

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError
from onepass.ops.cross_entropy.config import heuristic

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype, scale=3.0)


def _t(*shape: int, vocab_size: int = 8) -> Tensor:
    return targets(CPU, *(shape or (4,)), vocab_size=vocab_size)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_equals_torch(reduction: str, label_smoothing: float) -> None:
    x, t = _x(16, 100), _t(16, vocab_size=100)
    t[3] = -100
    more: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    loss, lse = onepass.cross_entropy(x, t, return_lse=True, **more)
    torch.testing.assert_close(loss, F.cross_entropy(x, t, **more))
    torch.testing.assert_close(lse, torch.logsumexp(x, -1))
    assert torch.equal(onepass.cross_entropy(x, t, **more), loss)


def test_results_are_float32_whatever_the_dtype() -> None:
    loss, lse = onepass.cross_entropy(_x(dtype=BF16), _t(), return_lse=True)
    assert loss.dtype == lse.dtype == torch.float32
    assert loss.shape == ()
    assert lse.shape == (4,)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_target_outside_makes_its_row_nan_alone(backend: str) -> None:
    x, t = _x(), torch.tensor([1, 8, -1, -100])
    with onepass.backend(backend):
        loss, lse = onepass.cross_entropy(x, t, reduction="none", return_lse=True)
        assert loss.isnan().tolist() == [False, True, True, False]
        assert bool(lse.isfinite().all())
        assert math.isnan(onepass.cross_entropy(x, t))
        assert not math.isnan(onepass.cross_entropy(x[:1], t[:1]))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_classes(backend: str) -> None:
    with onepass.backend(backend):
        loss, lse = onepass.cross_entropy(_x(3, 0), torch.tensor([0, -100, 5]), reduction="none", return_lse=True)
        assert loss.isnan().tolist() == [True, False, True]
        assert lse.tolist() == [-math.inf] * 3


def test_row_strides_past_2_31() -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 100, dtype=BF16)
    x = memory.as_strided((3, 100), (2**30, 1))
    x.copy_(normal(CPU, 3, 100, dtype=BF16))
    t = _t(3, vocab_size=100)
    assert torch.equal(onepass.cross_entropy(x, t), onepass.cross_entropy(x.clone(), t))


@pytest.mark.parametrize("element_size", [2, 4])
def test_parts_cover_the_row(element_size: int) -> None:
    for vocab_size in (0, 1, 111, 4096, 16385, 50257, 128256, 151936, 262144, 10**6, 10**9):
        config = heuristic(vocab_size, element_size)
        assert 1 <= config.parts <= 16
        assert 1 <= config.chunks <= 8
        assert config.segment * config.parts >= vocab_size
        assert config.chunk == config.num_warps * 512 // element_size


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-list": (lambda: onepass.cross_entropy([1.0], _t()), "'logits': expected a torch.Tensor, got list"),
    "logits-int": (lambda: onepass.cross_entropy(_x().int(), _t()), "'logits': expected float32, bfloat16 or float16"),
    "target-none": (lambda: onepass.cross_entropy(_x(), None), "'target': expected a torch.Tensor, got NoneType"),
    "target-float": (lambda: onepass.cross_entropy(_x(), _x(4)), r"'target': expected int64 or int32, got .*float32"),
    "ignore-index": (
        lambda: onepass.cross_entropy(_x(), _t(), ignore_index=1.5),  # type: ignore[call-overload]
        "'ignore_index': expected an integer, got float",
    ),
    "smoothing": (
        lambda: onepass.cross_entropy(_x(), _t(), label_smoothing="a"),  # type: ignore[call-overload]
        "'label_smoothing': expected a number, got str",
    ),
    "softcap": (
        lambda: onepass.cross_entropy(_x(), _t(), softcap="a"),  # type: ignore[call-overload]
        "'softcap': expected a number or None, got str",
    ),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "scalar": (lambda: onepass.cross_entropy(_x(1)[0], _t()), "'logits': expected at least one dimension"),
    "target-shape": (
        lambda: onepass.cross_entropy(_x(), _t(5)),
        r"'target': expected shape \[4\], the leading dimensions of logits, got \[5\]",
    ),
    "target-device": (
        lambda: onepass.cross_entropy(_x(), _t().to("meta")),
        "'target': expected the device of logits, cpu, got meta",
    ),
    "smoothing": (
        lambda: onepass.cross_entropy(_x(), _t(), label_smoothing=1.5),
        "'label_smoothing': expected a number from 0 to 1, got 1.5",
    ),
    "softcap-0": (
        lambda: onepass.cross_entropy(_x(), _t(), softcap=0.0),
        "'softcap': expected a finite number above 0",
    ),
    "softcap-inf": (lambda: onepass.cross_entropy(_x(), _t(), softcap=math.inf), "'softcap': expected a finite number"),
    "reduction": (
        lambda: onepass.cross_entropy(_x(), _t(), reduction="median"),  # type: ignore[call-overload]
        "'reduction': expected one of 'none', 'mean', 'sum', got 'median'",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"cross_entropy: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"cross_entropy: argument {message}"):
        call()


def test_gradients_are_refused_with_the_way_out() -> None:
    x = _x().requires_grad_()
    with pytest.raises(
        GradientsNotSupportedError, match=r"'logits' requires grad.*torch\.nn\.functional\.cross_entropy"
    ):
        onepass.cross_entropy(x, _t())
    with torch.no_grad():
        onepass.cross_entropy(x, _t())


def test_explain_and_warmup() -> None:
    assert onepass.explain(onepass.cross_entropy, _x(), _t(), softcap=30.0).backend == "cpu"
    (note,) = onepass.explain("cross_entropy", _x(2, 3, 8)[:, :2], _t(2, 2)).notes
    assert note == "'logits' has no single row stride and is copied to or from contiguous memory"
    (note,) = onepass.explain("cross_entropy", _x(2, 2, 8), _t(2, 3)[:, 1:]).notes
    assert note == "'target' has no single row stride and is copied to or from contiguous memory"
    (warmed,) = onepass.warmup("cross_entropy", [(2, 16)], dtypes=[BF16])
    assert (warmed.op, warmed.backend) == ("cross_entropy", "cpu")
