"""Inputs of sample that broke other libraries, and their siblings.

Every draw is compared with the reference in float64, id by id: no case draws within rounding of a step of its
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.sample.op import Desc
from onepass.ops.sample.spec import SPEC, VOCAB_LLAMA_3, VOCAB_SMOLLM2
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "batches", "eager", "in_place_forms", "outputs", "row_inputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
NAN, INF = float("nan"), float("inf")
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("ids", "valid") if inputs.get("return_valid") else ("ids",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """An id is right or wrong."""
    return (None,) * len(outputs(inputs))


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    results = SPEC.reference(**upcast(inputs))
    return results if isinstance(results, tuple) else (results,)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    """The logits, and every parameter with a number for each row."""
    rows = inputs["logits"].shape[0] if inputs["logits"].ndim else 0
    per_row = (name for name in PARAMETERS if isinstance(inputs.get(name), Tensor) and inputs[name].ndim)
    return ("logits", *(name for name in per_row if inputs[name].shape[0] == rows))


def seeds(device: torch.device, num_rows: int, first: int = 0) -> Tensor:
    return ((torch.arange(num_rows) + first) * 0x9E3779B97F4A7C1).to(device)


def plain(shape: tuple[int, ...], dtype: torch.dtype = FP32, **parameters: Any) -> Callable[[torch.device], Inputs]:
    """Normal logits, with a seed for each row unless one is given."""

    def build(device: torch.device) -> Inputs:
        given = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in parameters.items()}
        seed = {} if "seed" in given else {"seed": seeds(device, shape[0])}
        return {"logits": normal(device, *shape, dtype=dtype, scale=2.0), **seed, **given, "return_valid": True}

    return build


def rows(values: list[list[float]], dtype: torch.dtype = FP32, **parameters: Any) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "logits": torch.tensor(values, dtype=dtype, device=device),
        "seed": seeds(device, len(values)),
        "return_valid": True,
        **{name: v.to(device) if isinstance(v, Tensor) else v for name, v in parameters.items()},
    }


def _layout(name: str, make: Callable[[torch.device], Tensor], **parameters: Any) -> Case:
    def build(device: torch.device) -> Inputs:
        return {"logits": make(device), "seed": 12, "top_p": 0.9, "return_valid": True, **parameters}

    return Case(name, build)


PER_ROW = {
    "temperature": torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 0.1, 10.0, 1.0]),
    "top_k": torch.tensor([0, -1, 1, 2, 3, 111, 112, 5]),
    "top_p": torch.tensor([0.1, 1.0, 0.3, 0.4, 0.5, 0.6, 1.0, 0.8]),
    "min_p": torch.tensor([0.0, 0.1, 0.0, 0.2, 0.9, 0.0, 1.0, 0.01]),
}

_LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 30, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 1},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 1e-30},
    {"temperature": 100.0, "top_k": 50},
)


def _text(parameters: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in parameters.items()) or "no-limit"


def _cases() -> Iterator[Case]:
    for limits in _LIMITS:
        yield Case(_text(limits), plain((3, 500), **limits))
    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain((3, 576), dtype, top_p=0.95))
        yield Case(f"ties-{NAMES[dtype]}", rows([[0.0] * 300, [1.0] * 299 + [-1.0]], dtype, top_p=0.5))
    yield Case("one-token", plain((3, 1), top_p=0.5, top_k=3))
    yield Case("two-tokens", plain((5, 2), top_p=0.6))
    yield Case("N3-1023", plain((3, 1023), top_k=100))
    yield Case("S1-nothing-and-half", rows([[-INF] * 8, [-INF] * 4 + [0.0, 1.0, 2.0, 3.0], [NAN, -INF] * 4]))
    yield Case("S1-below-the-sentinel", rows([[-6e4, -6.1e4, -INF, -6e4], [-3e38, -3.1e38, -3e38, -INF]]))
    yield Case("S1-half-and-limits", rows([[-INF] * 40 + [0.0, 1.0, 2.0, 3.0]] * 2, top_k=20, top_p=0.99, min_p=0.01))
    yield Case("S2-nan-row", rows([[NAN] * 5, [0.0, 1.0, 2.0, 3.0, 0.0]], top_p=0.9))
    yield Case("S2-one-nan", rows([[1.0, NAN, 3.0, 2.0]] * 3, top_k=2))
    yield Case("infinities", rows([[INF, 1.0, INF, 0.0]] * 5 + [[INF] * 4] * 2 + [[INF, -INF, NAN, INF]] * 3))
    for top_k in (2**30, 0, -1, 112, 111, 110):
        yield Case(f"S3-top_k={top_k}", plain((2, 111), top_k=top_k))
    one_hot = [[-INF] * 7 + [0.0] + [-INF] * 3]
    yield Case("S3-one-hot", rows(one_hot, top_k=2**30))
    thirds = torch.tensor([0.4, 0.3, 0.3, 0.0]).log().tolist()
    yield Case("S4-top_k-tie", rows([thirds] * 5, top_k=2))
    yield Case("S4-top_p-tie", rows([thirds] * 4, top_p=0.5))
    yield Case("S4-top_k-then-top_p-tie", rows([[0.0] * 10] * 3, top_k=8, top_p=0.45))
    yield Case("S4-argmax-tie", rows([[1.0, 3.0, 3.0, 2.0], [3.0, 1.0, 3.0, 3.0]], temperature=0.0))
    yield Case("S4-top_k-1-tie", rows([[1.0, 3.0, 3.0, 2.0], [3.0, 1.0, 3.0, 3.0]], top_k=1))
    yield from _parameter_cases()
    yield from _layout_cases()


def _parameter_cases() -> Iterator[Case]:
    yield Case("S5-temperatures", plain((2, 111), temperature=torch.tensor([0.0, 1.0])))
    yield Case("per-row", plain((8, 111), **PER_ROW))
    yield Case("per-row-int32", plain((8, 111), **{**PER_ROW, "top_k": PER_ROW["top_k"].int()}))
    yield Case("shared-tensors", plain((2, 111), **{name: t[3:4] for name, t in PER_ROW.items()}))
    yield Case("scalar-tensors", plain((2, 111), top_p=torch.tensor(0.7), seed=torch.tensor(3), offset=torch.tensor(9)))
    wild = torch.tensor([-1.0, INF, NAN, 1.0, 1.0, 1.0, 1.0])
    yield Case("wild-temperatures", plain((7, 111), temperature=wild))
    yield Case("wild-top_p", plain((5, 111), top_p=torch.tensor([-1.0, NAN, 1.5, INF, 0.3])))
    yield Case("wild-min_p", plain((5, 111), min_p=torch.tensor([-1.0, NAN, 1.5, INF, 0.3])))
    yield Case("wild-top_k", plain((4, 111), top_k=torch.tensor([-(2**62), 2**62, -7, 4])))
    yield Case("S8-one-seed", plain((9, 111), seed=77, offset=2**40))
    yield Case("S8-negative-seed", plain((9, 111), seed=-(2**63), offset=-1))
    yield Case("S8-device-seed", plain((9, 111), seed=torch.tensor([2**62 + 5]), offset=torch.tensor([-3])))
    yield Case("every-other-parameter", plain((4, 111), temperature=torch.tensor([1.0, 9.0, 0.5, 9.0] * 2)[::2]))
    yield Case("expanded-parameter", plain((4, 111), top_p=torch.tensor(0.5).expand(4)))


def _layout_cases() -> Iterator[Case]:
    for shape in ((0, 111), (3, 0), (2, 0, 111), (0, 0)):
        yield Case(f"N5-{'x'.join(map(str, shape))}", plain(shape, seed=1))
    yield _layout("one-dimension", lambda d: normal(d, 300))
    yield _layout("three-dimensions", lambda d: normal(d, 2, 2, 300))
    yield _layout("N4-transposed", lambda d: normal(d, 111, 3).t())
    yield _layout("N4-slice", lambda d: normal(d, 3, 640)[:, 64:576])
    yield _layout("N4-not-collapsing", lambda d: normal(d, 2, 6, 96)[:, :2])
    yield _layout("N4-expanded", lambda d: normal(d, 1, 300).expand(3, 300))
    yield _layout("N4-every-other-column", lambda d: normal(d, 3, 300)[:, ::2])
    yield _layout("N7-offset-1", lambda d: normal(d, 3 * 576 + 1, dtype=BF16)[1:].view(3, 576))
    yield _layout("odd-end", lambda d: normal(d, 3, 600)[:, :573])
    for vocab in (VOCAB_LLAMA_3, 151936):
        yield Case(f"S6-{vocab}", plain((2, vocab)))
        yield Case(f"S6-{vocab}-top_p", plain((3, vocab), top_p=0.9, seed=3), many_programs=True)
        yield Case(f"S6-{vocab}-bf16-limits", plain((2, vocab), BF16, **_LIMITS[5]), many_programs=True)
    yield Case(f"smollm2-{VOCAB_SMOLLM2}", plain((3, VOCAB_SMOLLM2), top_k=50, top_p=0.95), many_programs=True)
    yield Case("N14-65537-rows", plain((65537, 8), seed=5, top_k=3), many_programs=True)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    """A seed for each row: what a row draws does not depend on where it stands."""
    yield plain((18, 111), top_p=0.9)(device)
    temperature, top_k = torch.linspace(0.0, 2.0, 18), torch.arange(18) * 7
    yield plain((18, 1000), BF16, temperature=temperature, top_k=top_k, top_p=torch.linspace(0.5, 1.0, 18))(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    overload = torch.ops.onepass.sample.default
    logits = normal(device, 3, 111)
    yield "sample", overload, (logits, *(None,) * 6, 0.8, 20, 0.9, 0.01, 5, 6)
    tensors = (torch.ones(3), torch.tensor([5, 0, 1]), torch.tensor([0.9]), torch.zeros(3), torch.arange(3), None)
    per_row = (None if t is None else t.to(device) for t in tensors)
    yield "sample-per-row", overload, (logits, *per_row, 1.0, 0, 1.0, 0.0, 0, 0)
    yield "sample-strided", overload, (normal(device, 111, 3).t(), *(None,) * 6, 1.0, 0, 1.0, 0.0, 5, 6)


def _compiled(vocab_size: int, dtype: torch.dtype, aligned: bool = True) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.sample import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, 4, vocab_size, torch.int64, aligned, ())
        return kernel_triton.specialize(desc, features)

    return specialize


# The results are one number a row.
COMPILED = {
    "fp32": Compiled(_compiled(VOCAB_LLAMA_3, FP32), wide=False),
    "bf16": Compiled(_compiled(VOCAB_LLAMA_3, BF16), wide=False),
    "fp16": Compiled(_compiled(VOCAB_LLAMA_3, FP16), archs=(90,), wide=False),
    "fp32-short": Compiled(_compiled(111, FP32, aligned=False), wide=False),
}
