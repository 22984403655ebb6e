"""Inputs of rms_norm that broke other libraries, and siblings: those of layer_norm, without its bias, and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, layer_norm, normal
from cases.compile_facts import ARCHS, Compiled
from cases.layer_norm import NAMES, in_place_forms, outputs
from onepass.ops.rms_norm.op import Desc
from onepass.ops.rms_norm.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """y in float64 from the sum as x's dtype holds it; the sum itself must be exact."""
    if inputs.get("residual") is None:
        return (SPEC.reference(**upcast(inputs)),)
    total = inputs["x"] + inputs["residual"]
    return SPEC.reference(**upcast({**inputs, "x": total, "residual": None})), None


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """The unfused ops. Where the weight has another dtype or an offset: their norm in float32, rounded once."""
    x, weight = inputs["x"], inputs.get("weight")
    total = x if inputs.get("residual") is None else x + inputs["residual"]
    inputs = {**inputs, "x": total, "residual": None}
    if weight is not None and (weight.dtype != x.dtype or inputs.get("weight_offset")):
        inputs = {name: value.float() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    y = SPEC.unfused(**inputs).to(x.dtype)
    return (y,) if total is x else (y, total)


def weight_of(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    return normal(device, n, dtype=dtype, base=1.0, scale=0.2, seed=101)


def plain(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    weight: torch.dtype | None = None,
    residual: bool = False,
    scale: float = 1.0,
    **more: object,
) -> Callable[[torch.device], Inputs]:
    """Contiguous random inputs; the weight has x's dtype, or that given."""

    def build(device: torch.device) -> Inputs:
        inputs: Inputs = {"x": normal(device, *shape, dtype=dtype, scale=scale)}
        inputs["weight"] = weight_of(device, shape[-1], weight or dtype)
        if residual:
            inputs["residual"] = normal(device, *shape, dtype=dtype, seed=1)
        return {**inputs, **more}

    return build


# Of layer_norm's cases those that are not about a mean, a bias or its CUDA kernel, by the start of their names.
SHARED = (
    *("N2-1-", "N2-3-", "N2-17-", "N2-33-", "N6-", "N-768-", "N-4096-bf16", "N-14336-", "N-16384-", "N-16385-"),
    *("N3-32769-", "N3-151936-", "N14-", "N5-", "N7-", "N4-transposed", "N4-qkv-slice-", "N4-3d-not-collapsing"),
    *("N4-expanded-row", "N4-every-other-column", "N4-one-", "N4-column", "N4-residual-", "N4-halves-"),
    *("N8-", "special-rows-", "tiny-rows-", "N10-", "N12-", "N13-", "parameters-strided", "parameters-unaligned"),
    *("parameters-x-is-weight", "silu-bf16", "gelu-fp32", "gelu_tanh-fp16-", "relu-bf16", "silu-special-rows-"),
)


def _shared() -> Iterator[Case]:
    def without_bias(case: Case) -> Callable[[torch.device], Inputs]:
        return lambda device: {name: value for name, value in case.build(device).items() if name != "bias"}

    for case in layer_norm.CASES:
        if case.name.startswith(SHARED):
            yield Case(case.name, without_bias(case), case.many_programs, case.gpu_only)


def _castings() -> Iterator[Case]:
    for casting in ("llama", "gemma"):
        for dtype in (BF16, FP16, FP32):  # N11
            name = f"N11-{casting}-{NAMES[dtype]}"
            yield Case(name, plain((4, 576), dtype, casting=casting))
            yield Case(f"{name}-offset", plain((4, 576), dtype, casting=casting, weight_offset=1.0))
        for weight in (BF16, FP32):
            name = f"N11-{casting}-weight-{NAMES[weight]}"
            yield Case(name, plain((4, 769), FP16, weight=weight, casting=casting, weight_offset=-0.5))
        name = f"N11-{casting}-offset-residual-silu"
        yield Case(name, plain((4, 4096), BF16, residual=True, casting=casting, weight_offset=1.0, activation="silu"))
        yield Case(f"N11-{casting}-20000", plain((2, 20000), BF16, residual=True, casting=casting, weight_offset=1.0))
        yield Case(f"N11-{casting}-no-weight", lambda d, c=casting: {"x": normal(d, 4, 576, dtype=BF16), "casting": c})


def _values() -> Iterator[Case]:
    def first_elements(size: float, dtype: torch.dtype, n: int) -> Callable[[torch.device], Inputs]:
        def build(device: torch.device) -> Inputs:
            inputs = plain((8, n), dtype)(device)
            inputs["x"][::2, :3] = size
            return inputs

        return build

    yield Case("outliers-bf16", first_elements(1e4, BF16, 4096))
    yield Case("outliers-fp16", first_elements(6e4, FP16, 4096))
    yield Case("outliers-fp32", first_elements(1e6, FP32, 4096))
    yield Case("outliers-fp32-long", first_elements(1e6, FP32, 32768))
    yield Case("squares-past-float32", plain((4, 576), FP32, scale=1e25))
    yield Case("squares-past-float32-bf16", plain((4, 576), BF16, scale=1e25))
    yield Case("squares-below-float32", plain((4, 576), FP32, scale=1e-25, eps=1e-30))
    yield Case("eps-0-zero-row", lambda d: {"x": torch.zeros(3, 40, device=d), "eps": 0.0})
    yield Case("long-special-rows-bf16", _long_special_rows)


def _long_special_rows(device: torch.device) -> Inputs:
    inputs = plain((5, 20000), BF16)(device)
    x = inputs["x"]
    x[0, 0], x[1, -1], x[2, 9000] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    return inputs


CASES = (*_shared(), *_castings(), *_values())


def batches(device: torch.device) -> Iterator[Inputs]:
    """Inputs of many rows, whose rows must not depend on each other; on a GPU enough for the kernel of many rows."""
    rows = 257 if device.type == "cpu" else 1027
    sizes = ((1, BF16), (17, BF16), (128, BF16), (576, BF16), (576, FP32), (769, FP16), (4096, BF16), (20000, BF16))
    for n, dtype in sizes:
        yield plain((rows if n < 1000 or device.type != "cpu" else 18, n), dtype, residual=n != 17)(device)
    if device.type != "cpu":
        yield {"x": normal(device, rows * 4096 + 1, dtype=BF16)[1:].view(rows, 4096)}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x, residual = normal(device, 2, 3, 24, dtype=BF16), normal(device, 2, 3, 24, dtype=BF16, seed=1)
    weight = weight_of(device, 24, FP32)
    strided = normal(device, 3, 2, 48, dtype=BF16).transpose(0, 1)[..., :24]
    y, total = torch.empty_like(x), torch.empty_like(x)
    llama, gemma = (1e-6, None, 0.0, "llama"), (1e-6, "silu", 1.0, "gemma")
    yield "rms_norm", ops.rms_norm.default, (x, weight, *gemma)
    yield "rms_norm-strided", ops.rms_norm.default, (strided, None, *llama)
    yield "rms_norm_residual", ops.rms_norm_residual.default, (x, residual, weight, *llama)
    yield "rms_norm_residual-strided", ops.rms_norm_residual.default, (strided, x, weight, *gemma)
    yield "rms_norm_out", ops.rms_norm_out.default, (x, weight, *llama, y)
    yield "rms_norm_residual_out", ops.rms_norm_residual_out.default, (x, residual, weight, *gemma, y, total)


def _compiled(
    n: int,
    dtype: torch.dtype = BF16,
    residual: bool = True,
    weight: torch.dtype | None = None,
    num_rows: int = 100,
    aligned: bool = True,
    gemma: bool = False,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.rms_norm import kernel_triton

        device, activation = torch.device("cuda", 0), "silu" if gemma else None
        rounds = dtype != FP32 and not gemma
        desc = Desc(device, dtype, weight or dtype, num_rows, n, activation, residual, gemma, rounds, aligned, ())
        return kernel_triton.specialize(desc, kernel_triton.heuristic(n, dtype.itemsize), features)

    return specialize


def _all_compiled() -> Iterator[tuple[str, Compiled]]:
    for n in (4096, 65536):
        yield f"{n}-bf16-residual", Compiled(_compiled(n), ARCHS if n == 4096 else (80, 90))
    yield "4096-bf16-residual-many-rows", Compiled(_compiled(4096, num_rows=1 << 20), (90,))
    yield "576-bf16-many-rows", Compiled(_compiled(576, residual=False, num_rows=1 << 20), (90,))
    yield "17-bf16-residual", Compiled(_compiled(17), (90,), wide=False)
    yield "16384-fp32-residual-gemma", Compiled(_compiled(16384, FP32, gemma=True), (90, "gfx942"))
    yield "768-fp16-weight-fp32", Compiled(_compiled(768, FP16, residual=False, weight=FP32), (90,))
    for n in (4096, 65536):
        yield f"{n}-bf16-unaligned", Compiled(_compiled(n, aligned=False), (90,), narrow=2)


COMPILED = dict(_all_compiled())
