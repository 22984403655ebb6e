"""Inputs of softmax_weighted_sum that break unfused code, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from cases.softmax import NAMES, special_rows
from onepass.ops.softmax_weighted_sum.op import Desc
from onepass.ops.softmax_weighted_sum.reference import softmax_weighted_sum as reference
from onepass.ops.softmax_weighted_sum.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = [
    "CASES",
    "COMPILED",
    "SPEC",
    "batches",
    "eager",
    "in_place_forms",
    "outputs",
    "overload_calls",
    "row_inputs",
    "truths",
]


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (reference(**upcast(inputs)),)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    return (SPEC.unfused(**inputs),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return ("logits",) if inputs["values"].ndim == 2 else ("logits", "values")


def own(
    *shape: int, dtype: torch.dtype = BF16, logits_dtype: torch.dtype | None = None, scale: float = 1.0
) -> Callable[[torch.device], Inputs]:
    """Each row with values of its own: `shape` is [..., N, D]."""
    return lambda device: {
        "logits": normal(device, *shape[:-1], dtype=logits_dtype or dtype, scale=scale),
        "values": normal(device, *shape, dtype=dtype, seed=1),
    }


def shared(
    rows: int, n: int, width: int, dtype: torch.dtype = BF16, logits_dtype: torch.dtype | None = None
) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "logits": normal(device, rows, n, dtype=logits_dtype or dtype),
        "values": normal(device, n, width, dtype=dtype, seed=1),
    }


def _special(dtype: torch.dtype, is_shared: bool) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        logits = special_rows(device, 100, dtype)
        values = normal(device, *(() if is_shared else (16,)), 100, 24, dtype=dtype, seed=1)
        return {"logits": logits, "values": values}

    return build


def _special_values(device: torch.device) -> Inputs:
    """A NaN or an infinity among the values reaches its column, and no other; with a weight of 0 it makes NaN."""
    inputs = own(6, 40, 24, dtype=FP32)(device)
    inputs["values"][1, 3, 5] = float("nan")
    inputs["values"][2, 3, 5] = float("inf")
    inputs["values"][3, 39, 23] = float("-inf")
    inputs["values"][4, 7, 0] = float("inf")
    inputs["logits"][4, 7] = float("-inf")
    return inputs


def _layout(
    name: str,
    make_values: Callable[[torch.device], Tensor],
    make_logits: Callable[[torch.device], Tensor] | None = None,
) -> Case:
    def build(device: torch.device) -> Inputs:
        values = make_values(device)
        logits = normal(device, *values.shape[:-1], dtype=BF16) if make_logits is None else make_logits(device)
        return {"logits": logits, "values": values}

    return Case(name, build)


def _cases() -> Iterator[Case]:
    def view(*shape: int, seed: int = 1) -> Callable[[torch.device], Tensor]:
        return lambda device: normal(device, *shape, dtype=BF16, seed=seed)

    for dtype in (BF16, FP16, FP32):
        name = NAMES[dtype]
        yield Case(f"own-{name}", own(5, 100, 130, dtype=dtype))
        yield Case(f"shared-{name}", shared(5, 100, 130, dtype=dtype))
        yield Case(f"S1-S2-{name}", _special(dtype, False))
        yield Case(f"S1-S2-shared-{name}", _special(dtype, True))
    yield Case("SmolLM2", own(2, 64, 576, dtype=BF16))
    yield Case("Llama-3", own(1, 40, 4096, dtype=BF16))
    yield Case("long", own(1, 3000, 16, dtype=FP32))
    yield Case("long-shared", shared(3, 3000, 16, dtype=FP32))
    yield Case("spread", own(3, 500, 16, dtype=FP32, scale=30.0))
    for n in (1, 3, 17):
        yield Case(f"N2-{n}", own(3, n, n, dtype=BF16))
        yield Case(f"N2-shared-{n}", shared(3, n, n, dtype=BF16))
    yield Case("float32-logits", own(3, 33, 40, dtype=BF16, logits_dtype=FP32))
    yield Case("float32-logits-shared", shared(3, 33, 40, dtype=FP16, logits_dtype=FP32))
    yield Case("bf16-logits-fp32-values", own(3, 33, 40, dtype=FP32, logits_dtype=BF16))
    yield Case("no-leading-dimension", own(33, 40, dtype=BF16))
    yield Case("4d", own(2, 3, 10, 40, dtype=BF16))
    yield Case("4d-shared", lambda d: {"logits": view(2, 3, 10)(d), "values": view(10, 40, seed=2)(d)})
    yield Case("special-values", _special_values)
    yield Case("N5-no-rows", own(0, 5, 8))
    yield Case("N5-no-columns", own(4, 5, 0))
    yield _layout("N4-values-transposed", lambda d: view(3, 24, 40)(d).transpose(-1, -2))
    yield _layout("N4-heads", lambda d: view(40, 6, 64)(d).transpose(0, 1))
    yield _layout("N4-slice", lambda d: view(3, 40, 128)(d)[..., 64:])
    yield _layout("N4-not-collapsing", lambda d: view(2, 5, 40, 64)(d)[:, :3])
    yield _layout("N4-same-values-expanded", lambda d: view(1, 40, 64)(d).expand(5, 40, 64))
    yield _layout("N4-logits-transposed", view(8, 8, 32), lambda d: view(8, 8, seed=2)(d).t())
    yield _layout("N7-offset-1", lambda d: view(3 * 40 * 64 + 1)(d)[1:].view(3, 40, 64))
    yield _layout("N7-offset-1-shared", lambda d: view(40 * 64 + 1)(d)[1:].view(40, 64), view(5, 40, seed=2))
    yield Case("many-rows", own(16400, 8, 16, dtype=BF16), many_programs=True)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    """Batches for the check that a row's bits do not depend on the others."""
    yield own(18, 100, 24, dtype=BF16)(device)
    yield own(18, 33, 17, dtype=FP32)(device)
    yield shared(70, 100, 40, dtype=BF16)(device)
    yield shared(70, 33, 24, dtype=FP32)(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    logits, values = normal(device, 2, 3, 10, dtype=BF16), normal(device, 2, 3, 10, 24, dtype=BF16, seed=1)
    yield "softmax_weighted_sum", ops.softmax_weighted_sum.default, (logits, values)
    yield "softmax_weighted_sum-shared", ops.softmax_weighted_sum.default, (logits, values[0, 0])
    out = torch.empty(2, 3, 24, dtype=BF16, device=device)
    yield "softmax_weighted_sum_out", ops.softmax_weighted_sum_out.default, (logits, values, out)


def _kernel(
    n: int, width: int, dtype: torch.dtype, is_shared: bool, rows: int = 64, aligned: bool = True
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.softmax_weighted_sum import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, dtype, rows, n, width, is_shared, aligned, ())
        return kernel_triton.specialize(desc, features)

    return specialize


# The results of a program are as few as its columns: no store is wide.
COMPILED = {
    "own-512x4096-bf16": Compiled(_kernel(512, 4096, BF16, False), wide=False),
    "own-512x4096-fp32": Compiled(_kernel(512, 4096, FP32, False), archs=(90,), wide=False),
    "own-8x4096-bf16": Compiled(_kernel(8, 4096, BF16, False), wide=False),
    "own-33x17-fp16": Compiled(_kernel(33, 17, FP16, False, aligned=False), archs=(90,), wide=False),
    "shared-512x4096-bf16": Compiled(_kernel(512, 4096, BF16, True), wide=False),
    "shared-512x576-fp32": Compiled(_kernel(512, 576, FP32, True), wide=False),
}
