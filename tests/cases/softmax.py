"""Inputs of softmax that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.row_config import MAX_RESIDENT
from onepass.ops.softmax.op import Desc
from onepass.ops.softmax.reference import softmax as reference
from onepass.ops.softmax.spec import SPEC
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

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
NAN, INF = float("nan"), float("inf")


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (reference(**upcast(inputs)),)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """torch's own; it has no temperature 0, so rows with one are the reference's."""
    temperature = inputs["temperature"]
    plain = SPEC.unfused(**inputs)
    if temperature is None:
        return (plain,)
    t = torch.as_tensor(temperature, device=plain.device).expand(plain.shape[:-1]).unsqueeze(-1)
    return (torch.where(t > 0, plain, reference(**inputs)),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "logits"},)


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return ("logits", "temperature")


def plain(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float = 3.0, temperature: float | None = None
) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "logits": normal(device, *shape, dtype=dtype, scale=scale),
        "temperature": temperature,
    }


def _layout(name: str, make: Callable[[torch.device], Tensor]) -> Case:
    return Case(name, lambda device: {"logits": make(device), "temperature": None})


def special_rows(device: torch.device, n: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """S1, S2 and their siblings: a row for each way in which a sum can go wrong, and good rows between them."""
    x = normal(device, 16, n, dtype=dtype, scale=spread)
    x[1] = -INF
    x[3, : n // 2] = -INF
    x[4, n // 2 :] = -INF
    x[5] = NAN
    x[7, n - 1] = NAN
    x[8, 0] = INF
    x[9] = INF
    x[10] = x[10].float().mul(0.1).sub(5.5e4).to(dtype)
    x[11] = -torch.finfo(dtype).max
    x[12, 0] = torch.finfo(dtype).max
    x[13] = -INF
    x[13, n // 3] = -7.0
    x[14] = 2.5
    return x


def _special(n: int, dtype: torch.dtype, temperature: float | None = None) -> Callable[[torch.device], Inputs]:
    return lambda device: {"logits": special_rows(device, n, dtype), "temperature": temperature}


def temperatures(device: torch.device, *shape: int) -> Tensor:
    """0, 1 and numbers between and above, one for each row."""
    values = torch.tensor([0.0, 1.0, 0.7, 1.3, 1e-3, 0.0, 50.0, 1e-30], device=device)
    return values[torch.arange(shape[0] if shape else 1, device=device) % 8].view(shape)


def _tempered(n: int, dtype: torch.dtype, rows: int = 16) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "logits": normal(device, rows, n, dtype=dtype, scale=3.0),
        "temperature": temperatures(device, rows),
    }


def _ties(n: int, temperature: float) -> Callable[[torch.device], Inputs]:
    """The largest logit several times: at temperature 0 the first one takes all."""

    def build(device: torch.device) -> Inputs:
        x = normal(device, 4, n, dtype=FP32)
        for row, columns in enumerate(((n - 1, n - 2), (0, n - 1), (n // 2, n // 2 + 1, n - 1), range(n))):
            x[row, list(columns)] = 9.0
        return {"logits": x, "temperature": temperature}

    return build


def _bad_temperatures(device: torch.device) -> Inputs:
    bad = torch.tensor([-1.0, 1.0, NAN, 0.5, -0.0, -INF], device=device)
    return {"logits": normal(device, 6, 576, dtype=BF16), "temperature": bad}


def _cases() -> Iterator[Case]:
    def view(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Callable[[torch.device], Tensor]:
        return lambda device: normal(device, *shape, dtype=dtype, seed=seed, scale=3.0)

    for dtype in (BF16, FP16, FP32):
        name = NAMES[dtype]
        for n in (111, 4096, 16400):
            yield Case(f"plain-{n}-{name}", plain((17, n) if n < 16400 else (3, n), dtype))
        yield Case(f"S1-S2-{name}", _special(576, dtype))
        yield Case(f"S5-{name}", _tempered(576, dtype))
    yield Case("S1-S2-long", _special(16400, BF16))
    yield Case("S1-S2-long-fp32", _special(16401, FP32))
    for n in (1, 3, 17, 2047, 2049):
        yield Case(f"N2-{n}", plain((n, n) if n < 20 else (2, n), BF16))
    yield Case("vector", plain((129,), FP32))
    yield Case("N6-769-fp16", plain((7, 769), FP16))
    for n in (16385, 32769, 65537):
        yield Case(f"N3-{n}", plain((2, n), BF16))
    for n, dtype in ((49152, BF16), (128256, FP32), (151936, BF16)):
        yield Case(f"S6-{n}-{NAMES[dtype]}", plain((2, n), dtype), many_programs=n > 100000)
    for shape in ((3, 0, 2520), (0, 4096), (4, 0), (0,)):
        yield Case(f"N5-{'x'.join(map(str, shape))}", plain(shape, BF16))
    yield Case("large-fp16", plain((7, 576), FP16, scale=3e4))
    yield Case("large-fp32", plain((7, 576), FP32, scale=1e38))
    yield Case("one-of-many", _one_of_many)
    yield Case("temperature", plain((7, 576), BF16, temperature=0.7))
    yield Case("temperature-int", plain((7, 576), FP32, temperature=2))
    yield Case("temperature-tiny", plain((7, 576), FP32, temperature=1e-40))
    yield Case("temperature-huge", plain((7, 577), FP32, temperature=3e38))
    yield Case("S1-S2-cold", _special(577, BF16, 0.0))
    yield Case("S1-S2-cold-long", _special(16400, FP32, 0.0))
    yield Case("S5-3d", _tempered_3d)
    yield Case("S5-long", _tempered(16400, BF16, 8))
    yield Case("S5-one-row", lambda d: {"logits": normal(d, 17), "temperature": torch.tensor(0.0, device=d)})
    yield Case("S5-temperatures-of-a-view", _strided_temperatures)
    for n in (111, 4099, 16400):
        yield Case(f"S4-ties-cold-{n}", _ties(n, 0.0))
    yield Case("S4-ties", _ties(111, 0.1))
    yield Case("bad-temperatures", _bad_temperatures)
    yield _layout("N4-transposed", lambda d: view(8, 8)(d).t())
    yield _layout("N4-qkv-slice", lambda d: view(17, 3 * 576)(d)[:, 576:1152])
    yield _layout("N4-3d-not-collapsing", lambda d: view(4, 6, 576)(d)[:, :3])
    yield _layout("N4-batch-and-sequence-swapped", lambda d: view(5, 4, 576)(d).transpose(0, 1))
    yield _layout("N4-expanded-row", lambda d: view(1, 576)(d).expand(17, 576))
    yield _layout("N4-every-other-column", lambda d: view(17, 1152)(d)[:, ::2])
    yield _layout("N7-offset-1", lambda d: view(17 * 576 + 1)(d)[1:].view(17, 576))
    yield _layout("N7-odd-stride", lambda d: view(17, 577)(d)[:, 1:])
    yield _layout("N7-long", lambda d: view(2 * 20001)(d)[1:-1].view(2, 20000))
    yield _layout("long-strided-rows", lambda d: view(2, 40000)(d)[:, :20000])
    yield Case("N14-65537-rows", plain((65537, 8), BF16), many_programs=True)
    yield Case("N1-past-2-31", _past_2_31, gpu_only=True)


def _one_of_many(device: torch.device) -> Inputs:
    """Nearly all of the sum is one term, in the last chunk."""
    x = normal(device, 2, 20000, dtype=FP32)
    x[:, -1] = 30.0
    return {"logits": x, "temperature": None}


def _tempered_3d(device: torch.device) -> Inputs:
    return {"logits": normal(device, 2, 4, 130, dtype=BF16), "temperature": temperatures(device, 8).view(2, 4)}


def _strided_temperatures(device: torch.device) -> Inputs:
    return {"logits": normal(device, 4, 130, dtype=FP16), "temperature": temperatures(device, 8)[1::2]}


def _past_2_31(device: torch.device) -> Inputs:
    """N1: a few rows of 2^31 elements of memory."""
    memory = torch.empty(2**31 + 20000, dtype=BF16, device=device)
    x = memory.as_strided((3, 20000), (2**30, 1))
    x.copy_(normal(device, 3, 20000, dtype=BF16))
    return {"logits": x, "temperature": None}


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    """Batches for the check that a row's bits do not depend on the others."""
    yield {"logits": normal(device, 18, 576, dtype=BF16, scale=3.0), "temperature": None}
    yield {"logits": normal(device, 33, 111, dtype=FP32, scale=3.0), "temperature": temperatures(device, 33)}
    yield {"logits": normal(device, 18, 4096, dtype=FP16, scale=3.0), "temperature": 0.8}
    yield {"logits": normal(device, 18, 20000, dtype=BF16, scale=3.0), "temperature": temperatures(device, 18)}
    yield {"logits": normal(device, 18, 128256, scale=3.0), "temperature": None}
    yield {"logits": normal(device, 18, 20001, scale=3.0), "temperature": None}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x = normal(device, 2, 3, 24, dtype=BF16)
    strided = normal(device, 3, 2, 48, dtype=BF16).transpose(0, 1)[..., :24]
    t = temperatures(device, 6).view(2, 3)
    yield "softmax", ops.softmax.default, (x, None, 0.5)
    yield "softmax-rows", ops.softmax.default, (strided, t, 1.0)
    yield "softmax_out", ops.softmax_out.default, (x, t, 1.0, torch.empty_like(x))


def _desc(n: int, dtype: torch.dtype, rows: int, per_row: bool, aligned: bool) -> Desc:
    return Desc(torch.device("cuda", 0), dtype, rows, n, per_row, per_row, aligned, ())


def _short(
    n: int, dtype: torch.dtype, rows: int = 64, per_row: bool = False, aligned: bool = True
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.softmax import kernel_triton

        return kernel_triton.specialize(_desc(n, dtype, rows, per_row, aligned), features)

    return specialize


def _long(
    part: int, n: int, dtype: torch.dtype, rows: int = 64, per_row: bool = False, aligned: bool = True
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.softmax import kernel_triton

        return kernel_triton.specialize_long(_desc(n, dtype, rows, per_row, aligned), features)[part]

    return specialize


# The first kernel for long rows writes a number a chunk: its stores are narrow.
COMPILED = {
    "4096-bf16": Compiled(_short(4096, BF16)),
    "4096-fp32": Compiled(_short(4096, FP32)),
    "576-bf16-rows": Compiled(_short(576, BF16, rows=8192, per_row=True), archs=(90,)),
    "111-fp32": Compiled(_short(111, FP32, aligned=False), archs=(90,), wide=False, narrow=4),
    "16384-fp32": Compiled(_short(MAX_RESIDENT, FP32, per_row=True), archs=(90,)),
    "statistics-128256-fp32": Compiled(_long(0, 128256, FP32), wide=False),
    "finish-128256-fp32": Compiled(_long(1, 128256, FP32)),
    "statistics-128256-bf16-many": Compiled(_long(0, 128256, BF16, 8192, True), archs=(90,), wide=False),
    "finish-128256-bf16-many": Compiled(_long(1, 128256, BF16, 8192, True), archs=(90,)),
}
