"""Inputs of the gated activations that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.gated_activation.op import PACKED, Desc
from onepass.ops.gated_activation.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "row_inputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (SPEC.reference(**upcast(inputs)),)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    # A product has the strides of its factors.
    return (SPEC.unfused(**inputs).contiguous(),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return () if inputs.get("up") is None else ({"out": "up"}, {"out": "x"})


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return ("x",) if inputs.get("up") is None else ("x", "up")


def packed(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str = "silu", scale: float = 1.0
) -> Callable[[torch.device], Inputs]:
    return lambda device: {"x": normal(device, *shape, dtype=dtype, scale=scale), "activation": activation}


def separate(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str = "silu", scale: float = 1.0
) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "x": normal(device, *shape, dtype=dtype, scale=scale),
        "up": normal(device, *shape, dtype=dtype, scale=scale, seed=1),
        "activation": activation,
    }


def _view(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Callable[[torch.device], Tensor]:
    return lambda device: normal(device, *shape, dtype=dtype, seed=seed)


def _layout(name: str, make_x: Callable[[torch.device], Tensor], up: Callable[[Tensor], Tensor] | None = None) -> Case:
    """A packed x; with `up`, which is made from x, two tensors."""

    def build(device: torch.device) -> Inputs:
        x = make_x(device)
        return {"x": x} if up is None else {"x": x, "up": up(x)}

    return Case(name, build)


def _contiguous(x: Tensor) -> Tensor:
    return normal(x.device, *x.shape, dtype=x.dtype, seed=1)


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        for activation in PACKED:
            name = f"{activation}-{NAMES[dtype]}"
            yield Case(f"packed-{name}", packed((17, 1152), dtype, activation, scale=4.0))
            yield Case(f"special-{name}", _special(dtype, activation))
        yield Case(f"separate-{NAMES[dtype]}", separate((17, 576), dtype, scale=4.0))
        yield Case(f"tails-{NAMES[dtype]}", _tails(dtype))
    for activation in ("gelu", "gelu_tanh", "relu"):
        yield Case(f"separate-{activation}", separate((17, 577), BF16, activation))
    yield from _sizes()
    yield from _layouts()


def _sizes() -> Iterator[Case]:
    for n in (1, 2, 3, 7, 8, 16, 17, 2047, 2049):  # N2
        yield Case(f"N2-packed-{n}", packed((5, 2 * n), BF16))
    yield Case("N2-packed-vector", packed((34,), BF16))
    yield Case("separate-scalar", separate((), FP32))
    yield Case("separate-vector-2049", separate((2049,), BF16))
    yield Case("N6-769-fp16", packed((7, 2 * 769), FP16))
    yield Case("SmolLM2-135M", packed((3, 3072), BF16))
    yield Case("Llama-3-8B", packed((1, 1, 28672), BF16))
    yield Case("N3-151936", packed((2, 2 * 151936), BF16))
    for shape in ((3, 0, 2520), (0, 4096), (4, 0), (0,)):
        yield Case(f"N5-packed-{'x'.join(map(str, shape))}", packed(shape, BF16))
        yield Case(f"N5-separate-{'x'.join(map(str, shape))}", separate(shape, BF16))
    yield Case("N8-fp16-300", packed((1, 16), FP16, scale=300.0))
    yield Case("fp16-overflow", packed((17, 576), FP16, scale=4e3))
    yield Case("bf16-large", packed((17, 576), BF16, scale=1e19))
    yield Case("N14-65537-rows", _many_rows, many_programs=True)


def _layouts() -> Iterator[Case]:
    yield _layout("N4-packed-transposed", lambda d: _view(8, 8)(d).t())
    yield _layout("N4-packed-slice", lambda d: _view(17, 3 * 576)(d)[:, 576:1152])
    yield _layout("N4-packed-3d-not-collapsing", lambda d: _view(4, 6, 576)(d)[:, :3])
    yield _layout("N4-packed-batch-and-sequence-swapped", lambda d: _view(5, 4, 576)(d).transpose(0, 1))
    yield _layout("N4-packed-expanded-row", lambda d: _view(1, 576)(d).expand(17, 576))
    yield _layout("N4-packed-every-other-column", lambda d: _view(17, 1152)(d)[:, ::2])
    yield _layout("N7-packed-offset-1", lambda d: _view(17 * 576 + 1)(d)[1:].view(17, 576))
    yield _layout("N7-packed-odd-stride", lambda d: _view(17, 577)(d)[:, 1:])
    yield _layout("N7-packed-narrow-half", _view(17, 2 * 100 + 8))
    yield Case("halves-of-one-tensor", _halves)
    yield Case("halves-of-columns", _interleaved)
    yield _layout("separate-same-tensor-twice", _view(17, 576), lambda x: x)
    yield _layout("N4-separate-transposed", lambda d: _view(576, 17)(d).t(), lambda x: x.clone())
    yield _layout("N4-separate-gate-strided", lambda d: _view(17, 1152)(d)[:, :576], _contiguous)
    yield _layout("N4-separate-up-expanded", _view(17, 576), lambda x: x[:1].expand(17, 576))
    yield _layout("N4-separate-3d-not-collapsing", lambda d: _view(4, 6, 576)(d)[:, :3], _contiguous)
    yield _layout("N7-separate-offset-1", lambda d: _view(17 * 576 + 1)(d)[1:].view(17, 576), _contiguous)
    yield _layout("long-strided-rows", lambda d: _view(3, 10000)(d)[:, :8200], _contiguous)


def _halves(device: torch.device) -> Inputs:
    x = normal(device, 17, 1152, dtype=BF16)
    return {"x": x[:, :576], "up": x[:, 576:]}


def _interleaved(device: torch.device) -> Inputs:
    """Some models keep gate and up in alternating columns."""
    x = normal(device, 17, 1152, dtype=BF16)
    return {"x": x[:, ::2], "up": x[:, 1::2]}


def _special(dtype: torch.dtype, activation: str) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")], dtype=dtype)
        # On CPUs, some versions of torch take the exact GELU of inf for NaN: the yardstick is no help there.
        gates = values[values != torch.inf] if activation == "gelu" else values
        gate, up = torch.meshgrid(gates, values, indexing="ij")
        return {"x": torch.cat((gate, up), dim=1).to(device), "activation": activation}

    return build


def _tails(dtype: torch.dtype) -> Callable[[torch.device], Inputs]:
    """Gates from -300 to 300, where exp overflows."""

    def build(device: torch.device) -> Inputs:
        gate = torch.linspace(-300, 300, 1200, device=device)
        return {"x": gate.to(dtype).view(3, 400), "up": normal(device, 3, 400, dtype=dtype)}

    return build


def _many_rows(device: torch.device) -> Inputs:
    return {"x": normal(device, 65537, 12, dtype=BF16)[:, :10]}


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    yield {"x": normal(device, 257, 1152, dtype=BF16)}
    yield {"x": normal(device, 33, 577, dtype=BF16)[:, 1:], "up": normal(device, 33, 576, dtype=BF16, seed=1)}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x, up = normal(device, 2, 3, 24, dtype=BF16), normal(device, 2, 3, 24, dtype=BF16, seed=1)
    strided = normal(device, 3, 2, 48, dtype=BF16).transpose(0, 1)[..., :24]
    half = torch.empty(2, 3, 12, dtype=BF16, device=device)
    yield "gated_activation", ops.gated_activation.default, (x, up, "silu")
    yield "gated_activation-strided", ops.gated_activation.default, (strided, up, "gelu")
    yield "gated_activation_out", ops.gated_activation_out.default, (x, up, "relu", torch.empty_like(x))
    yield "gated_activation_packed", ops.gated_activation_packed.default, (x, "silu")
    yield "gated_activation_packed-strided", ops.gated_activation_packed.default, (strided, "gelu_tanh")
    yield "gated_activation_packed_out", ops.gated_activation_packed_out.default, (x, "silu", half)


def _compiled(
    dtype: torch.dtype = BF16,
    activation: str = "silu",
    is_packed: bool = True,
    num_rows: int = 64,
    aligned: bool = True,
    n: int = 14336,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.gated_activation import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, activation, is_packed, num_rows, n, aligned, ())
        return kernel_triton.specialize(desc, features)

    return specialize


COMPILED = {
    "silu-bf16": Compiled(_compiled()),
    "silu-bf16-separate": Compiled(_compiled(is_packed=False), archs=(80, 90)),
    "silu-bf16-1536": Compiled(_compiled(n=1536), archs=(90,)),
    "silu-fp16": Compiled(_compiled(FP16), archs=(90,)),
    "silu-fp32": Compiled(_compiled(FP32), archs=(80, 90, "gfx942")),
    **{
        f"{activation}-bf16": Compiled(_compiled(activation=activation), archs=(90,))
        for activation in PACKED
        if activation != "silu"
    },
    "gelu-fp32": Compiled(_compiled(FP32, "gelu"), archs=(90,)),
    "silu-bf16-unaligned": Compiled(_compiled(aligned=False, n=14335), archs=(90,), narrow=2),
}
