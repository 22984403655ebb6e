"""Inputs of layer_norm that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import ARCHS, Compiled
from onepass.ops.layer_norm.op import Desc
from onepass.ops.layer_norm.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "params", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", None: "none"}
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",) if inputs.get("residual") is None else ("out", "residual_out")


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """y in float64 from the sum as x's dtype holds it; the sum itself must be exact."""
    if inputs.get("residual") is None:
        return (SPEC.reference(**upcast(inputs)),)
    total = inputs["x"] + inputs["residual"]
    return SPEC.reference(**upcast({**inputs, "x": total, "residual": None})), None


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """The unfused ops. Where torch refuses a mix of dtypes: their norm in float32, rounded once."""
    x = inputs["x"]
    total = x if inputs.get("residual") is None else x + inputs["residual"]
    inputs = {**inputs, "x": total, "residual": None}
    parameters = [p.dtype for p in (inputs.get("weight"), inputs.get("bias")) if p is not None]
    if any(dtype != x.dtype for dtype in parameters):
        wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        y = SPEC.unfused(**wide).to(x.dtype)
    else:
        y = SPEC.unfused(**inputs)
    return (y,) if total is x else (y, total)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    if inputs.get("residual") is None:
        return ({"out": "x"},)
    return (
        {"out": "x"},
        {"residual_out": "x"},
        {"residual_out": "residual"},
        {"out": "x", "residual_out": "residual"},
        {"out": "residual", "residual_out": "x"},
    )


def params(device: torch.device, n: int, weight: torch.dtype | None, bias: torch.dtype | None = None) -> Inputs:
    """A weight around 1 and a bias around 0."""
    return {
        "weight": None if weight is None else normal(device, n, dtype=weight, base=1.0, scale=0.2, seed=101),
        "bias": None if bias is None else normal(device, n, dtype=bias, scale=0.2, seed=102),
    }


def plain(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    weight: bool = True,
    residual: bool = False,
    scale: float = 1.0,
    base: float = 0.0,
    activation: str | None = None,
    eps: float = 1e-5,
) -> Callable[[torch.device], Inputs]:
    """Contiguous random inputs."""

    def build(device: torch.device) -> Inputs:
        inputs: Inputs = {"x": normal(device, *shape, dtype=dtype, scale=scale, base=base)}
        if weight:
            inputs |= params(device, shape[-1], dtype, dtype)
        if residual:
            inputs["residual"] = normal(device, *shape, dtype=dtype, seed=1)
        return {**inputs, "activation": activation, "eps": eps}

    return build


def _sizes() -> Iterator[Case]:
    for n in (1, 2, 3, 7, 8, 16, 17, 31, 33):  # N2
        yield Case(f"N2-{n}-bf16", plain((33, n), BF16))
    for n in (1, 3, 17):
        yield Case(f"N2-{n}-fp32", plain((33, n), FP32))
    yield Case("N2-17-fp16-residual", plain((33, 17), FP16, residual=True))
    yield Case("N6-769-fp16", plain((7, 769), FP16))
    for n in (64, 255, 257, 768, 1000, 4096):
        yield Case(f"N-{n}-bf16", plain((17, n), BF16))
    yield Case("N-576-fp32", plain((17, 576), FP32))
    yield Case("N-1000-fp16-silu", plain((17, 1000), FP16, activation="silu"))
    yield Case("N-4096-bf16-silu", plain((17, 4096), BF16, activation="silu"))
    yield Case("N-14336-bf16", plain((3, 14336), BF16))
    yield Case("N-16384-fp32", plain((3, 16384), FP32))
    yield Case("N-16385-bf16-residual", plain((3, 16385), BF16, residual=True))
    for n in (32769, 102400, 151936):  # N3
        yield Case(f"N3-{n}-bf16", plain((2, n), BF16))
    yield Case("N3-65537-fp32", plain((2, 65537), FP32))
    yield Case("N3-151936-fp32-residual", plain((2, 151936), FP32, residual=True))
    yield Case("N3-32769-fp16-gelu", plain((2, 32769), FP16, activation="gelu"))
    for rows in (65536, 65537):  # N14
        yield Case(f"N14-{rows}-rows", plain((rows, 8), BF16), many_programs=True)
    yield Case("N14-65537-rows-576", plain((65537, 576), BF16), many_programs=True, gpu_only=True)


def _layout(name: str, make_x: Callable[[torch.device], Tensor], *, residual: bool = False) -> Case:
    def build(device: torch.device) -> Inputs:
        x = make_x(device)
        inputs: Inputs = {"x": x, **params(device, x.shape[-1], x.dtype, x.dtype)}
        if residual:
            inputs["residual"] = normal(device, *x.shape, dtype=x.dtype, seed=1)
        return inputs

    return Case(name, build)


def _sliding_windows(device: torch.device) -> Tensor:
    return normal(device, 16 * 48 + 576, dtype=BF16).as_strided((16, 576), (48, 1))


def _odd_stride(device: torch.device) -> Tensor:
    return normal(device, 16, 577, dtype=BF16)[:, :576]


def _layouts() -> Iterator[Case]:
    def view(*shape: int, dtype: torch.dtype = BF16) -> Callable[[torch.device], Tensor]:
        return lambda device: normal(device, *shape, dtype=dtype)

    yield _layout("N4-transposed", lambda d: view(8, 8)(d).t())
    yield _layout("N4-transposed-residual", lambda d: view(576, 17)(d).t(), residual=True)
    yield _layout("N4-qkv-slice-residual", lambda d: view(17, 3 * 576)(d)[:, 576:1152], residual=True)
    yield _layout("N4-qkv-slice-3d", lambda d: view(2, 9, 3 * 576)(d)[..., 1152:])
    yield _layout("N4-3d-not-collapsing", lambda d: view(4, 6, 576)(d)[:, :3], residual=True)
    yield _layout("N4-3d-first-column-sliced", lambda d: view(4, 3, 600)(d)[:, 1:, 8:584])
    yield _layout("N4-batch-and-sequence-swapped", lambda d: view(5, 4, 576)(d).transpose(0, 1))
    yield _layout("N4-4d-permuted", lambda d: view(2, 24, 3, 8)(d).permute(0, 2, 3, 1), residual=True)
    yield _layout("N4-expanded-row", lambda d: view(1, 576)(d).expand(17, 576))
    yield _layout("N4-expanded-batch", lambda d: view(1, 5, 576)(d).expand(4, 5, 576))
    yield _layout("N4-expanded-columns", lambda d: view(17, 1)(d).expand(17, 576))
    yield _layout("N4-every-other-column", lambda d: view(17, 1152)(d)[:, ::2])
    yield _layout("N4-every-other-row", lambda d: view(34, 576)(d)[::2], residual=True)
    yield _layout("N4-one-dimension", view(576))
    yield _layout("N4-one-dimension-strided", lambda d: view(1152)(d)[::2])
    yield _layout("N4-one-row-of-many", lambda d: view(17, 1152)(d)[3:4, :576])
    yield _layout("N4-column", lambda d: view(33, 5)(d)[:, 2:3])
    yield _layout("N4-sliding-windows", _sliding_windows)
    yield _layout("N4-four-dimensions", view(2, 3, 2, 576))
    yield _layout("N7-offset-1", lambda d: view(17 * 576 + 1)(d)[1:].view(17, 576), residual=True)
    yield _layout("N7-offset-1-fp32", lambda d: view(17 * 576 + 1, dtype=FP32)(d)[1:].view(17, 576))
    yield _layout("N7-offset-1-long", lambda d: view(2 * 32768 + 1)(d)[1:].view(2, 32768), residual=True)
    yield _layout("N7-odd-stride", _odd_stride)
    yield _layout("N7-odd-stride-4096", lambda d: view(5, 4097)(d)[:, 1:])

    def residual_strided(device: torch.device) -> Inputs:
        x = normal(device, 17, 576, dtype=BF16)
        return {"x": x, "residual": normal(device, 17, 1152, dtype=BF16, seed=1)[:, 576:]}

    def residual_transposed(device: torch.device) -> Inputs:
        x = normal(device, 17, 576, dtype=BF16)
        return {"x": x, "residual": normal(device, 576, 17, dtype=BF16, seed=1).t()}

    def residual_expanded(device: torch.device) -> Inputs:
        return {
            "x": normal(device, 17, 576, dtype=BF16),
            "residual": normal(device, 1, 576, dtype=BF16, seed=1).expand(17, 576),
        }

    def residual_is_x(device: torch.device) -> Inputs:
        x = normal(device, 17, 576, dtype=BF16)
        return {"x": x, "residual": x}

    def halves_of_one_buffer(device: torch.device) -> Inputs:
        x, residual = normal(device, 17, 1152, dtype=BF16).chunk(2, dim=1)
        return {"x": x, "residual": residual}

    for build in (residual_strided, residual_transposed, residual_expanded, residual_is_x, halves_of_one_buffer):
        yield Case(f"N4-{build.__name__.replace('_', '-')}", build)


def _empty() -> Iterator[Case]:
    for shape in ((3, 0, 2520), (0, 4096), (0,), (4, 0), (2, 0, 0)):  # N5
        for residual in (False, True):
            name = f"N5-{'x'.join(map(str, shape))}{'-residual' if residual else ''}"
            yield Case(name, plain(shape, BF16, residual=residual))


def _rows(
    name: str, dtype: torch.dtype, fill: Callable[[Tensor], None], n: int = 576, rows: int = 16, **more: object
) -> Case:
    """Random rows of which `fill` changes some."""

    def build(device: torch.device) -> Inputs:
        x = normal(torch.device("cpu"), rows, n, dtype=FP32)
        fill(x)
        return {"x": x.to(device=device, dtype=dtype), **params(device, n, dtype, dtype), **more}

    return Case(name, build)


def _values() -> Iterator[Case]:
    yield Case("N8-fp16-300", lambda d: {"x": torch.full((1, 8), 300.0, dtype=FP16, device=d)})
    yield _rows("N8-fp16-large", FP16, lambda x: x.mul_(1e4).clamp_(-65504, 65504))
    yield _rows("N8-fp16-result-overflows", FP16, lambda x: x[3, ::50].fill_(1e4), activation=None)
    ramp = 100 + torch.arange(16) * 1e-3
    yield Case("N9-ramp", lambda d: {"x": (ramp + torch.arange(16)[:, None]).to(d), **params(d, 16, FP32, FP32)})
    for n in (16, 576, 32769):
        yield Case(f"N9-base-1e6-{n}", plain((16 if n < 1000 else 2, n), FP32, base=1e6))
    yield Case("N9-base-minus-3e4-fp16", plain((16, 576), FP16, base=-3e4, scale=100.0))
    yield Case("N9-base-1e6-bf16", plain((16, 576), BF16, base=1e6, scale=1e4))
    yield Case("N9-base-100-bf16-residual", plain((16, 576), BF16, base=100.0, residual=True))

    for dtype in (BF16, FP16, FP32):
        name = NAMES[dtype]
        yield _rows(f"constant-rows-{name}", dtype, lambda x: x[::2].copy_(torch.arange(1, 9)[:, None] * 0.37))
        yield _rows(f"special-rows-{name}", dtype, _special)

    # The Triton kernel centres the variance on the first 8 columns of half-precision rows, a block of long ones.
    for n in (576, 4096, 16384):
        for dtype, size in ((BF16, 1e4), (FP16, 6e4), (FP32, 1e6)):
            yield _rows(f"outliers-first-8-{n}-{NAMES[dtype]}", dtype, _outliers_first(8, size), n=n)
    for n in (4096, 16384, 32768, 65536):
        rows = 16 if n == 4096 else 4
        yield _rows(f"outliers-first-8-small-rest-fp16-{n}", FP16, _outliers_first(8, 6e4, rest=1e-3), n=n, rows=rows)
    yield _rows("outliers-first-block-fp32", FP32, _outliers_first(4096, 1e4), n=65536, rows=2)
    yield _rows("outliers-first-block-bf16", BF16, _outliers_first(8192, 1e3), n=65536, rows=2)
    yield _rows("outliers-last-fp32", FP32, lambda x: x[:, -8:].fill_(1e5), n=4096)
    for dtype, size in ((BF16, 3e3), (FP16, 3e3), (FP32, 3e3)):
        yield _rows(f"massive-activations-{NAMES[dtype]}", dtype, _massive(size), n=4096, activation="silu")
    yield _rows("opposite-outliers-bf16", BF16, _opposite, n=4096)
    yield _rows("large-constant-rows-fp32", FP32, lambda x: x[::4].fill_(1e24 / 7), n=4096)
    # The mean's rounding error, squared, overflows here.
    yield _rows("largest-constant-rows-fp32", FP32, lambda x: x[::4].fill_(3e38), n=4096)
    yield _rows("largest-constant-rows-bf16", BF16, lambda x: x[::4].fill_(3e38), n=4096)
    yield _rows("largest-constant-rows-fp16", FP16, lambda x: x[::4].fill_(65504.0), n=4096)
    yield _rows("tiny-rows-fp32", FP32, lambda x: x[::2].mul_(1e-20), eps=0.0)
    yield _rows("tiny-rows-fp16", FP16, lambda x: x[::2].mul_(1e-4), eps=1e-12)

    for eps in (1e-12, 1.0, 1):
        yield Case(f"eps-{eps!r}", plain((16, 576), FP32, eps=eps))
    yield Case("N12-residual-cancels", _cancelling)
    yield Case("N12-residual-overflows-fp16", _overflowing)
    yield Case("N13-fp32", plain((16, 576), FP32, weight=False))


def _special(x: Tensor) -> None:
    x[0, 0] = float("nan")
    x[1, -1] = float("inf")
    x[2, 7] = -float("inf")
    x[3, 100], x[3, 200] = float("inf"), -float("inf")
    x[4] = float("nan")
    x[5] = float("inf")
    x[6] = 0.0


def _outliers_first(count: int, size: float, rest: float = 1.0) -> Callable[[Tensor], None]:
    def fill(x: Tensor) -> None:
        x[::2] *= rest
        x[::2, :count] = size * (1 + 0.01 * x[::2, :count]).clamp(max=1.0)

    return fill


def _massive(size: float) -> Callable[[Tensor], None]:
    """One column of a few rows, as large language models have them."""

    def fill(x: Tensor) -> None:
        x[0, 5] = size
        x[3, 1415] = -size
        x[5, 4095] = size
        x[6, 0] = size

    return fill


def _opposite(x: Tensor) -> None:
    x[::2, :4] = 1e4
    x[::2, 4:8] = -1e4
    x[1::2, :8] = 1e4
    x[1::2, -8:] = -1e4


def _cancelling(device: torch.device) -> Inputs:
    """x + residual is mostly rounding: what is normalised is the rounded sum."""
    x = normal(device, 16, 576, dtype=BF16, scale=100.0)
    residual = (-x.float() + normal(device, 16, 576, seed=1)).to(BF16)
    return {"x": x, "residual": residual, **params(device, 576, BF16, BF16)}


def _overflowing(device: torch.device) -> Inputs:
    x = normal(device, 16, 576, dtype=FP16)
    residual = normal(device, 16, 576, dtype=FP16, seed=1)
    x[::3, 10] = residual[::3, 10] = 6e4
    x[1, 20], residual[1, 20] = 6e4, -6e4
    return {"x": x, "residual": residual, **params(device, 576, FP16, FP16)}


def _parameters() -> Iterator[Case]:
    mixes = (
        (BF16, FP32, FP32),
        (FP32, BF16, BF16),
        (BF16, FP16, FP32),
        (FP16, FP32, BF16),
        (FP32, FP16, None),
        (BF16, None, FP32),
        (FP16, None, None),
    )
    for dtype, weight, bias in mixes:  # N10

        def build(device: torch.device, mix: tuple[torch.dtype | None, ...] = (dtype, weight, bias)) -> Inputs:
            return {"x": normal(device, 16, 576, dtype=mix[0] or FP32), **params(device, 576, mix[1], mix[2])}

        yield Case(f"N10-{NAMES[dtype]}-{NAMES[weight]}-{NAMES[bias]}", build)

    def strided(device: torch.device) -> Inputs:
        wide = params(device, 1152, BF16, BF16)
        x = normal(device, 16, 576, dtype=BF16)
        return {"x": x, "weight": wide["weight"][::2], "bias": wide["bias"][1::2]}

    def expanded(device: torch.device) -> Inputs:
        one = params(device, 1, BF16, BF16)
        x = normal(device, 16, 576, dtype=BF16)
        return {"x": x, "weight": one["weight"].expand(576), "bias": one["bias"].expand(576)}

    def unaligned(device: torch.device) -> Inputs:
        wide = params(device, 577, BF16, BF16)
        x = normal(device, 16, 576, dtype=BF16)
        return {"x": x, "weight": wide["weight"][1:], "bias": wide["bias"][1:]}

    def weight_is_bias(device: torch.device) -> Inputs:
        weight = params(device, 576, BF16)["weight"]
        return {"x": normal(device, 16, 576, dtype=BF16), "weight": weight, "bias": weight}

    def x_is_weight(device: torch.device) -> Inputs:
        x = normal(device, 576, dtype=BF16)
        return {"x": x, "weight": x}

    for named in (strided, expanded, unaligned, weight_is_bias, x_is_weight):
        yield Case(f"parameters-{named.__name__.replace('_', '-')}", named)


def _long_rows() -> Iterator[Case]:
    """Aligned, more columns than registers hold: on sm_90 the CUDA kernel takes those in bfloat16."""

    def build(
        n: int, dtype: torch.dtype, weight: bool, bias: bool, activation: str | None, rows: int = 3, gap: int = 0
    ) -> Callable[[torch.device], Inputs]:
        def make(device: torch.device) -> Inputs:
            x = normal(device, rows, n + gap, dtype=dtype)[:, :n]
            return {
                "x": x,
                **params(device, n, dtype if weight else None, dtype if bias else None),
                "activation": activation,
            }

        return make

    yield Case("long-16392-bf16", build(16392, BF16, True, True, None))
    yield Case("long-16384-plus-64-fp16-silu", build(16448, FP16, True, True, "silu"))
    yield Case("long-24584-bf16-no-parameters", build(24584, BF16, False, False, None))
    yield Case("long-32768-bf16-silu", build(32768, BF16, True, True, "silu"))
    yield Case("long-50000-fp16-weight", build(50000, FP16, True, False, "gelu_tanh"))
    yield Case("long-65536-bf16-bias", build(65536, BF16, False, True, "relu"))
    yield Case("long-90112-bf16-gelu", build(90112, BF16, True, True, "gelu"))
    yield Case("long-32768-strided", build(32768, BF16, True, True, None, gap=8))
    yield Case("long-40960-700-rows", build(40960, BF16, True, True, None, rows=700), many_programs=True, gpu_only=True)
    yield _rows("long-special-rows-bf16", BF16, _special, n=32768, rows=8, activation="silu")
    yield _rows("long-constant-rows-fp16", FP16, lambda x: x[::2].fill_(0.37), n=32768, rows=4)


def _activations() -> Iterator[Case]:
    for activation in ACTIVATIONS[1:]:
        for dtype in (BF16, FP32):
            yield Case(f"{activation}-{NAMES[dtype]}", _wide(dtype, activation))
    yield Case("silu-fp16", _wide(FP16, "silu"))
    yield Case("gelu_tanh-fp16-residual", plain((16, 576), FP16, residual=True, activation="gelu_tanh"))
    yield _rows("silu-special-rows-bf16", BF16, _special, activation="silu")
    yield _rows("relu-special-rows-bf16", BF16, _special, activation="relu")
    yield _rows("gelu-special-rows-fp16", FP16, _special, activation="gelu")


def _wide(dtype: torch.dtype, activation: str | None) -> Callable[[torch.device], Inputs]:
    """Arguments of the activation from about -200 to 200: tails, where exp overflows."""

    def build(device: torch.device) -> Inputs:
        weight = torch.logspace(-2, 1.7, 576, device=device).to(dtype)
        bias = normal(device, 576, dtype=dtype, scale=1.0, seed=102)
        return {"x": normal(device, 16, 576, dtype=dtype), "weight": weight, "bias": bias, "activation": activation}

    return build


def _residuals() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield Case(f"N12-residual-{NAMES[dtype]}", plain((16, 576), dtype, residual=True))
    yield Case("residual-no-parameters", plain((16, 576), BF16, residual=True, weight=False))
    yield Case("residual-4096-silu", plain((16, 4096), BF16, residual=True, activation="silu"))
    yield Case("residual-4096-fp32", plain((16, 4096), FP32, residual=True))
    yield Case("residual-769", plain((16, 769), BF16, residual=True))


CASES = (
    *_sizes(),
    *_layouts(),
    *_empty(),
    *_values(),
    *_parameters(),
    *_long_rows(),
    *_activations(),
    *_residuals(),
)


def check_largest_constant_rows(device: torch.device, n: int) -> None:
    """The sum of a bfloat16 row may overflow float32 where its mean does not. The yardstick of the other cases is no
    help: torch's own norm fails here on a CPU."""
    x = torch.full((16, n), torch.finfo(BF16).max, dtype=BF16, device=device)
    x[1::2] = torch.finfo(BF16).min
    bias = normal(device, n, dtype=BF16)
    y = SPEC.fused(x, bias=bias)
    torch.testing.assert_close(y, bias.expand(16, n), rtol=0, atol=0)


def batches(device: torch.device) -> Iterator[Inputs]:
    for n, dtype in ((1, BF16), (17, BF16), (576, BF16), (576, FP32), (769, FP16), (32769, BF16)):
        inputs = {"x": normal(device, 257, n, dtype=dtype), **params(device, n, dtype, dtype), "activation": "silu"}
        yield inputs
        yield {**inputs, "residual": normal(device, 257, n, dtype=dtype, seed=1), "activation": None}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x, residual = normal(device, 2, 3, 24, dtype=BF16), normal(device, 2, 3, 24, dtype=BF16, seed=1)
    weight, bias = params(device, 24, FP32, BF16).values()
    strided = normal(device, 3, 2, 48, dtype=BF16).transpose(0, 1)[..., :24]
    y, total = torch.empty_like(x), torch.empty_like(x)
    yield "layer_norm", ops.layer_norm.default, (x, weight, bias, 1e-5, "silu")
    yield "layer_norm-strided", ops.layer_norm.default, (strided, None, None, 1e-5, None)
    yield "layer_norm_residual", ops.layer_norm_residual.default, (x, residual, weight, bias, 1e-5, None)
    yield "layer_norm_residual-strided", ops.layer_norm_residual.default, (strided, x, weight, None, 1e-5, "gelu")
    yield "layer_norm_out", ops.layer_norm_out.default, (x, weight, bias, 1e-5, "relu", y)
    yield (
        "layer_norm_residual_out",
        ops.layer_norm_residual_out.default,
        (x, residual, weight, bias, 1e-5, "gelu_tanh", y, total),
    )


def _compiled(
    n: int,
    dtype: torch.dtype = BF16,
    residual: bool = True,
    weight: torch.dtype | None = None,
    num_rows: int = 100,
    aligned: bool = True,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.layer_norm import config, kernel_triton

        vector = weight or dtype
        device = torch.device("cuda", 0)
        desc = Desc(device, dtype, vector, vector, num_rows, n, "silu", residual, aligned, ())
        return kernel_triton.specialize(desc, config.heuristic(n, dtype.itemsize), features)

    return specialize


def _all_compiled() -> Iterator[tuple[str, Compiled]]:
    for n in (17, 576, 768, 4096, 14336, 16384, 65536, 100003):
        wide = n % 16 == 0
        yield f"{n}-bf16-residual", Compiled(_compiled(n), wide=wide)
        yield f"{n}-bf16", Compiled(_compiled(n, residual=False), (90,), wide)
        yield f"{n}-bf16-residual-many-rows", Compiled(_compiled(n, num_rows=1 << 20), (90,), wide)
        archs = ARCHS if n in (4096, 16384, 65536, 100003) else (90,)
        yield f"{n}-fp32-residual", Compiled(_compiled(n, FP32), archs, wide)
        yield f"{n}-fp32", Compiled(_compiled(n, FP32, residual=False), (90,), wide)
    for n in (768, 65536):
        yield f"{n}-fp16-residual", Compiled(_compiled(n, FP16), (90,))
        yield f"{n}-fp16-weight-fp32", Compiled(_compiled(n, FP16, residual=False, weight=FP32), (90,))
        yield f"{n}-fp32-weight-bf16", Compiled(_compiled(n, FP32, residual=False, weight=BF16), (90,))
    for n in (17, 768, 4096, 65536):
        archs = (80, 90) if n == 4096 else (90,)
        yield f"{n}-bf16-unaligned", Compiled(_compiled(n, aligned=False), archs, narrow=2)


COMPILED = dict(_all_compiled())
