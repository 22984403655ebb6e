"""Inputs of logsumexp that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from cases.softmax import NAMES, special_rows
from onepass.ops.logsumexp.op import Desc
from onepass.ops.logsumexp.reference import logsumexp as reference
from onepass.ops.logsumexp.spec import SPEC
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


def plain(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 3.0) -> Callable[[torch.device], Inputs]:
    return lambda device: {"x": normal(device, *shape, dtype=dtype, scale=scale)}


def _special(n: int, dtype: torch.dtype) -> Callable[[torch.device], Inputs]:
    return lambda device: {"x": special_rows(device, n, dtype)}


def _layout(name: str, make: Callable[[torch.device], Tensor]) -> Case:
    return Case(name, lambda device: {"x": make(device)})


def _cases() -> Iterator[Case]:
    def view(*shape: int, dtype: torch.dtype = BF16) -> Callable[[torch.device], Tensor]:
        return lambda device: normal(device, *shape, dtype=dtype, scale=3.0)

    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-4096-{NAMES[dtype]}", plain((17, 4096), dtype))
        yield Case(f"S1-S2-{NAMES[dtype]}", _special(576, dtype))
    yield Case("S1-S2-long", _special(20000, BF16))
    yield Case("S1-S2-long-fp32", _special(16400, FP32))
    for n in (1, 3, 17, 111, 2049):
        yield Case(f"N2-{n}", plain((2, n), BF16))
    yield Case("vector", plain((129,), FP32))
    yield Case("N6-769-fp16", plain((7, 769), FP16))
    for n, dtype in ((16385, BF16), (65537, FP16), (128256, FP32), (151936, BF16)):
        yield Case(f"N3-S6-{n}-{NAMES[dtype]}", plain((2, n), dtype), many_programs=n > 100000)
    for shape in ((3, 0, 2520), (0, 4096), (4, 0), (0,)):
        yield Case(f"N5-{'x'.join(map(str, shape))}", plain(shape, BF16))
    yield Case("near-zero", _near_zero)
    yield _layout("N4-transposed", lambda d: view(8, 8)(d).t())
    yield _layout("N4-3d", view(2, 3, 576))
    yield _layout("N4-3d-not-collapsing", lambda d: view(4, 6, 576)(d)[:, :3])
    yield _layout("N4-expanded-row", lambda d: view(1, 576)(d).expand(17, 576))
    yield _layout("N7-offset-1", lambda d: view(17 * 576 + 1)(d)[1:].view(17, 576))
    yield _layout("N7-long", lambda d: view(2 * 20001)(d)[1:-1].view(2, 20000))
    yield _layout("long-strided-rows", lambda d: view(3, 40000)(d)[:, :20000])
    yield Case("N14-65537-rows", plain((65537, 8), BF16), many_programs=True)


def _near_zero(device: torch.device) -> Inputs:
    """The maximum and the logarithm of the sum nearly cancel."""
    return {"x": normal(device, 5, 1000, scale=0.1, base=-6.9)}


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    """Batches for the check that a row's bits do not depend on the others."""
    yield {"x": normal(device, 18, 576, dtype=BF16, scale=3.0)}
    yield {"x": normal(device, 33, 111, dtype=FP32, scale=3.0)}
    yield {"x": normal(device, 18, 4096, dtype=FP16, scale=3.0)}
    yield {"x": normal(device, 18, 128256, scale=3.0)}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x = normal(device, 2, 3, 24, dtype=BF16)
    yield "logsumexp", ops.logsumexp.default, (x,)
    yield "logsumexp-strided", ops.logsumexp.default, (x.transpose(0, 1),)
    yield "logsumexp_out", ops.logsumexp_out.default, (x, torch.empty(2, 3, device=device))


def _kernel(n: int, dtype: torch.dtype, part: int | None = None, rows: int = 64) -> Callable[[Any], Any]:
    """The kernel for short rows, or one of the two for long rows."""

    def specialize(features: Any) -> Any:
        from onepass.ops.logsumexp import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, rows, n, True, ())
        if part is None:
            return kernel_triton.specialize(desc, features)
        return kernel_triton.specialize_long(desc, features)[part]

    return specialize


# A number a row, or a chunk of it, is written: no store is wide.
COMPILED = {
    "4096-bf16": Compiled(_kernel(4096, BF16), wide=False),
    "16384-fp32": Compiled(_kernel(16384, FP32), archs=(90,), wide=False),
    "576-bf16-rows": Compiled(_kernel(576, BF16, rows=8192), archs=(90,), wide=False),
    "statistics-128256-bf16": Compiled(_kernel(128256, BF16, 0), wide=False),
    "merge-128256-bf16": Compiled(_kernel(128256, BF16, 1), wide=False),
}
