"""Inputs of add_relu that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.add_relu.op import Desc
from onepass.ops.add_relu.spec import SPEC
from onepass.ops.spec import Inputs

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """The sum is rounded once, as torch does: the result is exact."""
    return (None,)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    return (SPEC.unfused(**inputs),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "x"}, {"out": "y"})


def plain(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "x": normal(device, *shape, dtype=dtype, scale=scale),
        "y": normal(device, *shape, dtype=dtype, scale=scale, seed=1),
    }


def _layout(
    name: str, make_x: Callable[[torch.device], Tensor], make_y: Callable[[torch.device], Tensor] | None = None
) -> Case:
    def build(device: torch.device) -> Inputs:
        x = make_x(device)
        return {"x": x, "y": normal(device, *x.shape, dtype=x.dtype, seed=1) if make_y is None else make_y(device)}

    return Case(name, build)


def _cases() -> Iterator[Case]:
    def view(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Callable[[torch.device], Tensor]:
        return lambda device: normal(device, *shape, dtype=dtype, seed=seed)

    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain((17, 4096), dtype))
        yield Case(f"special-{NAMES[dtype]}", _special(dtype))
    yield Case("scalar", plain((), FP32))
    for n in (1, 3, 17, 2047, 2049):
        yield Case(f"N2-vector-{n}", plain((n,), BF16))
    yield Case("N6-769-fp16", plain((7, 769), FP16))
    yield Case("N3-151936", plain((2, 151936), BF16))
    for shape in ((3, 0, 2520), (0, 4096), (4, 0), (0,)):
        yield Case(f"N5-{'x'.join(map(str, shape))}", plain(shape, BF16))
    yield Case("fp16-overflow", plain((17, 576), FP16, scale=4e4))
    yield _layout("N4-transposed", lambda d: view(8, 8)(d).t())
    yield _layout("N4-both-transposed", lambda d: view(576, 17)(d).t(), lambda d: view(576, 17, seed=1)(d).t())
    yield _layout("N4-qkv-slice", lambda d: view(17, 3 * 576)(d)[:, 576:1152])
    yield _layout("N4-3d-not-collapsing", lambda d: view(4, 6, 576)(d)[:, :3])
    yield _layout("N4-batch-and-sequence-swapped", lambda d: view(5, 4, 576)(d).transpose(0, 1))
    yield _layout("N4-expanded-row", lambda d: view(1, 576)(d).expand(17, 576))
    yield _layout("N4-expanded-scalar", lambda d: view(1, 1)(d).expand(17, 576))
    yield _layout("N4-every-other-column", lambda d: view(17, 1152)(d)[:, ::2])
    yield _layout("N4-narrow-rows", lambda d: view(100, 8)(d)[:, 2:5], lambda d: view(100, 5, seed=1)(d)[:, :3])
    yield _layout("N4-column", lambda d: view(33, 5)(d)[:, 2:3])
    yield _layout("N4-same-tensor-twice", view(17, 576), view(17, 576))
    yield _layout("N7-offset-1", lambda d: view(17 * 576 + 1)(d)[1:].view(17, 576))
    yield _layout("N7-offset-1-of-y", view(17, 576), lambda d: view(17 * 576 + 1, seed=1)(d)[1:].view(17, 576))
    yield _layout("N7-odd-stride", lambda d: view(17, 577)(d)[:, 1:])
    yield _layout("long-strided-rows", lambda d: view(3, 10000)(d)[:, :8200])
    yield Case("x-is-y", _x_is_y)
    yield Case("N14-65537-rows", _many_rows, many_programs=True)


def _special(dtype: torch.dtype) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        values = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")], dtype=dtype, device=device
        )
        x, y = torch.meshgrid(values, values, indexing="ij")
        return {"x": x.contiguous(), "y": y.contiguous()}

    return build


def _x_is_y(device: torch.device) -> Inputs:
    x = normal(device, 17, 576, dtype=BF16)
    return {"x": x, "y": x}


def _many_rows(device: torch.device) -> Inputs:
    return {
        "x": normal(device, 65537, 8, dtype=BF16)[:, :5],
        "y": normal(device, 65537, 5, dtype=BF16, seed=1),
    }


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    yield {"x": normal(device, 257, 577, dtype=BF16)[:, 1:], "y": normal(device, 257, 576, dtype=BF16, seed=1)}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x, y = normal(device, 2, 3, 24, dtype=BF16), normal(device, 2, 3, 24, dtype=BF16, seed=1)
    strided = normal(device, 3, 2, 48, dtype=BF16).transpose(0, 1)[..., :24]
    yield "add_relu", ops.add_relu.default, (x, y)
    yield "add_relu-strided", ops.add_relu.default, (strided, y)
    yield "add_relu_out", ops.add_relu_out.default, (x, y, torch.empty_like(x))


def _compiled(n: int, dtype: torch.dtype, num_rows: int = 1, aligned: bool = True) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.add_relu import kernel_triton

        return kernel_triton.specialize(Desc(torch.device("cuda", 0), dtype, num_rows, n, aligned, ()), features)

    return specialize


COMPILED = {
    **{f"{NAMES[dtype]}": Compiled(_compiled(1 << 20, dtype)) for dtype in (BF16, FP16, FP32)},
    "bf16-rows": Compiled(_compiled(4096, BF16, num_rows=7), archs=(90,)),
    "bf16-unaligned": Compiled(_compiled(4096, BF16, num_rows=7, aligned=False), archs=(90,), narrow=2),
}
