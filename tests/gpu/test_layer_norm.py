"""layer_norm on a GPU: what test_ops.py does not cover."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, checks, compiled, layer_norm, normal
from torch import Tensor

import onepass
from onepass.ops.accuracy import compare
from onepass.ops.spec import Inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)

# Up to this many rows the Triton kernel takes the form for few rows (kernel_triton.py, which is only imported where
# there is a GPU).
FEW_ROWS = 1024


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
def test_long_cases_run_in_cuda() -> None:
    """The table names those that the CUDA kernel must take `long-`; its bits are checked in test_ops.py."""
    for case in layer_norm.CASES:
        if case.name.startswith("long-") and "fp16" not in case.name:
            assert onepass.explain("layer_norm", **case.build(CUDA)).backend == "cuda", case.name


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
@pytest.mark.parametrize(("n", "dtype"), [(32768, BF16), (90112, BF16)])
def test_a_row_has_the_same_bits_in_every_batch_in_cuda(n: int, dtype: torch.dtype) -> None:
    x = normal(CUDA, 300, n, dtype=dtype)
    with onepass.backend("cuda"):
        checks.check_batch_independence(layer_norm, {"x": x, **layer_norm.params(CUDA, n, dtype, dtype)})


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("n", [1, 17, 576, 768, 1024, 4096, 14336, 16384, 32768])
def test_a_row_has_the_same_bits_in_every_batch(n: int, aligned: bool) -> None:
    with onepass.backend("triton"):
        checks.check_batch_independence(layer_norm, _batch(n, BF16, aligned))


@pytest.mark.parametrize(("n", "dtype"), [(17, FP32), (576, FP32), (4096, FP32), (32768, FP32), (768, FP16)])
def test_a_row_has_the_same_bits_in_every_batch_of_other_dtypes(n: int, dtype: torch.dtype) -> None:
    checks.check_batch_independence(layer_norm, _batch(n, dtype, aligned=True))


@pytest.mark.parametrize("n", [768, 32768])
def test_a_row_has_the_same_bits_in_every_batch_with_a_residual(n: int) -> None:
    inputs = _batch(n, BF16, aligned=True)
    checks.check_batch_independence(layer_norm, {**inputs, "residual": inputs["x"].flip(0)})


def _batch(n: int, dtype: torch.dtype, aligned: bool) -> Inputs:
    """Enough rows for the kernel of many rows, where there is one."""
    rows = FEW_ROWS + 3
    offset = 0 if aligned else 1
    x = normal(CUDA, rows * n + offset, dtype=dtype)[offset:].view(rows, n)
    return {"x": x, **layer_norm.params(CUDA, n, dtype, dtype), "activation": "silu"}


@pytest.mark.parametrize("n", [576, 32769])
def test_largest_constant_rows(n: int) -> None:
    layer_norm.check_largest_constant_rows(CUDA, n)


def test_batch_sizes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """N15: one kernel serves every batch size up to many rows, divisible by 16 or not."""
    from triton.compiler import CompiledKernel

    x = normal(CUDA, 256, 576, dtype=BF16)
    onepass.layer_norm(x[:2])
    onepass.layer_norm(x[:2], residual=x[:2])
    created = []
    original = CompiledKernel.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledKernel, "__init__", counting)
    for num_tokens in (1, 3, 16, 17, 32, 255, 256):
        onepass.layer_norm(x[:num_tokens])
        onepass.layer_norm(x[:num_tokens], residual=x[:num_tokens])
    assert not created


def test_offsets_past_2_31() -> None:
    """N1: 524289 rows of 4096."""
    x = _large(524289, 4096)
    inputs = {"x": x, **layer_norm.params(CUDA, 4096, BF16, BF16), "activation": "silu"}
    (y,) = checks.call(layer_norm, inputs)
    _check_some_rows(inputs, (y,))
    del y
    residual = _large(524289, 4096, seed=1)
    some = _some(x)
    kept = {**inputs, "x": x[some], "residual": residual[some]}
    results = checks.call(layer_norm, {**inputs, "residual": residual}, out=residual, residual_out=x)
    expected = checks.call(layer_norm, kept)
    checks.assert_same_bits(tuple(r[some] for r in results), expected, "in place")


def test_strided_offsets_past_2_31() -> None:
    """N1: rows x stride past 2^31, written beside the input in the same memory."""
    memory = _large(262145, 8192)
    x, out = memory[:, :4096], memory[:, 4096:]
    inputs = {"x": x, **layer_norm.params(CUDA, 4096, BF16, BF16)}
    before = x[_some(x)].clone()
    results = checks.call(layer_norm, inputs, out=out)
    _check_some_rows(inputs, results)
    assert torch.equal(x[_some(x)], before)


@pytest.mark.parametrize("backend", ["triton", None], ids=["triton", "default"])
def test_long_rows_with_offsets_past_2_31(backend: str | None) -> None:
    x = _large(65537, 32776)
    inputs = {"x": x, **layer_norm.params(CUDA, 32776, BF16, BF16)}
    with onepass.backend(backend) if backend else nullcontext():
        results = checks.call(layer_norm, inputs, out=x[:, :])
    _check_some_rows({**inputs, "x": _large(65537, 32776)}, results)


def test_a_row_longer_than_2_31() -> None:
    """Any N: columns are not counted in 32 bits."""
    n = 2**31 + 24
    x = _large(1, n)
    ends = (slice(0, 4096), slice(n - 4096, n))
    kept = [x[:, end].double() for end in ends]
    chunks = x.split(2**27, dim=1)
    mean = sum(float(c.double().sum()) for c in chunks) / n
    variance = sum(float((c.double() - mean).square().sum()) for c in chunks) / n
    y = onepass.layer_norm(x, out=x)
    assert isinstance(y, Tensor)
    for end, values in zip(ends, kept, strict=True):
        truth = (values - mean) * (variance + 1e-5) ** -0.5
        accuracy = compare(y[:, end], truth.to(BF16), truth)
        assert accuracy.ok, accuracy


def test_more_rows_than_2_31() -> None:
    n = 2**31 + 3
    bias = torch.full((1,), 0.5, dtype=BF16, device=CUDA)
    x = torch.zeros(n, 1, dtype=BF16, device=CUDA)
    onepass.layer_norm(x, bias=bias, out=x)
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


def _check_some_rows(inputs: Inputs, results: tuple[Tensor, ...]) -> None:
    some = _some(inputs["x"])
    few = {**inputs, "x": inputs["x"][some]}
    checks.check_values(layer_norm, few, tuple(r[some] for r in results))


@pytest.mark.parametrize("n", [576, 40000])
def test_row_strides_past_2_31(n: int) -> None:
    """Few rows, far apart; what lies between is never touched."""
    memory = torch.empty(2**31 + n, dtype=BF16, device=CUDA)
    x = memory.as_strided((3, n), (2**30, 1))
    x.copy_(normal(CUDA, 3, n, dtype=BF16))
    inputs = {"x": x.clone(), **layer_norm.params(CUDA, n, BF16, BF16)}
    checks.check_values(
        layer_norm, inputs, tuple(t.contiguous() for t in checks.call(layer_norm, {**inputs, "x": x}, out=x))
    )


@pytest.mark.parametrize("function", [compiled.norm_residual, compiled.norm_in_place], ids=lambda f: f.__name__)
def test_compile_with_inductor(function: Any) -> None:
    compiled.check_compiled(function, CUDA, "inductor", dynamic=True)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'x': expected float32, bfloat16 or float16, got torch\.float64"):
        onepass.layer_norm(normal(CUDA, 4, 8).double())
    with pytest.raises(ValueError, match=r"'weight': expected the device of x, cuda:0, got cpu"):
        onepass.layer_norm(normal(CUDA, 4, 8), torch.ones(8))
