"""Inputs of rms_norm_rope that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case
from cases.compile_facts import Compiled
from cases.rope_inputs import BAD, MODELS, NAMES, Model, heads, layouts, positions, special, table, weight
from onepass.ops.rms_norm_rope.spec import SPEC
from onepass.ops.rope_call import Desc
from onepass.ops.rope_reference import rms_norm, rotate
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (SPEC.reference(**upcast(inputs)),)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """Norm and rotation one after the other, each in float32 and rounded: stricter than models."""
    x = inputs["x"]
    normed = rms_norm(x, inputs["weight"], inputs.get("eps", 1e-6), inputs.get("weight_offset", 0.0)).to(x.dtype)
    turned = rotate(normed, inputs["cos_sin_cache"], inputs["positions"], inputs.get("interleaved", False))
    return (turned.to(x.dtype),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "x"},)


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return "x", "positions"


def plain(
    model: Model,
    dtype: torch.dtype = BF16,
    num_tokens: int = 3,
    interleaved: bool = False,
    weight_dtype: torch.dtype | None = None,
    **more: Any,
) -> Callable[[torch.device], Inputs]:
    num_heads, _, head_dim, rotary_dim = model

    def build(device: torch.device) -> Inputs:
        return {
            "x": heads(device, num_tokens, num_heads, head_dim, dtype=dtype),
            "weight": weight(device, head_dim, weight_dtype or dtype),
            "cos_sin_cache": table(device, rotary_dim),
            "positions": positions(device, num_tokens),
            "interleaved": interleaved,
            **more,
        }

    return build


def _changed(build: Callable[[torch.device], Inputs], **changes: Callable[[torch.device], Any]) -> Any:
    return lambda device: {**build(device), **{name: make(device) for name, make in changes.items()}}


def _values(name: str, dtype: torch.dtype, fill: Callable[[Tensor], object], **more: Any) -> Case:
    """`fill` changes x in place."""

    def build(device: torch.device) -> Inputs:
        inputs = plain(MODELS["R3-128-64"], dtype, num_tokens=8, **more)(device)
        fill(inputs["x"])
        return inputs

    return Case(f"{name}-{NAMES[dtype]}", build)


def _cases() -> Iterator[Case]:
    for name, model in MODELS.items():
        yield Case(name, plain(model))
        yield Case(f"R6-{name}-interleaved", plain(model, interleaved=True))
    for dtype in (FP16, FP32):
        for name in ("R8-smollm2", "R3-128-64", "R3-80-32", "7-4"):
            yield Case(f"{name}-{NAMES[dtype]}", plain(MODELS[name], dtype))
            yield Case(f"R6-{name}-{NAMES[dtype]}-interleaved", plain(MODELS[name], dtype, interleaved=True))
    smol = MODELS["R8-smollm2"]
    for dtype in (torch.int32, torch.int64):
        yield Case(f"R1-{dtype}", _changed(plain(smol), positions=lambda d, dtype=dtype: positions(d, 6, dtype)[::2]))
    for name, (values, dtype) in BAD.items():
        wrong = _changed(
            plain(MODELS["R3-128-64"], num_tokens=len(values)),
            positions=lambda d, v=values, t=dtype: torch.tensor(v, dtype=t, device=d),
        )
        yield Case(name, wrong)
    yield Case("R5-fp32", _changed(plain(smol, FP32), positions=lambda d: torch.arange(256, 259, device=d)))

    for name, make in layouts(3, 9, 64):
        tokens = 1 if "one-token" in name else 3
        yield Case(f"{name}", _changed(plain(smol, num_tokens=tokens), x=make))
    yield Case("N4-weight-strided", _changed(plain(smol), weight=lambda d: weight(d, 128)[::2]))
    yield Case("N7-weight-offset-1", _changed(plain(smol), weight=lambda d: weight(d, 65)[1:]))
    yield Case("N5-no-tokens", plain(smol, num_tokens=0))
    yield Case("N5-no-heads", plain(Model(0, 0, 64, 64)))

    for dtype in (BF16, FP16, FP32):
        yield _values("special", dtype, special)
        yield _values("special-interleaved", dtype, special, interleaved=True)
    yield _values("N8-300", FP16, lambda x: x.fill_(300.0))
    yield _values("N8-largest", FP16, lambda x: x[::2].fill_(65504.0))
    yield _values("N9-base-1e6", FP32, lambda x: x.mul_(1e-3).add_(1e6))
    yield _values("large", FP32, lambda x: x.mul_(1e15))
    yield _values("tiny", FP32, lambda x: x[::2].mul_(1e-15), eps=0.0)
    yield _values("tiny", FP16, lambda x: x[::2].mul_(1e-4), eps=1e-12)
    yield _values("outliers", BF16, lambda x: x[:, :, 5].mul_(3e3))
    for dtype, other in ((BF16, FP32), (FP32, BF16), (FP16, FP32)):  # N10
        yield Case(f"N10-{NAMES[dtype]}-{NAMES[other]}", plain(smol, dtype, weight_dtype=other))
    yield Case("N11-gemma", plain(MODELS["256"], weight_offset=1.0))
    yield Case("N11-gemma-fp32", plain(MODELS["256"], FP32, weight_offset=1.0, eps=1e-5))
    yield Case("N11-offset-int", plain(smol, weight_offset=1, eps=1))
    yield Case("N14-65537-tokens", plain(Model(1, 1, 8, 8), num_tokens=65537), many_programs=True)
    yield Case("many-tokens", plain(MODELS["llama-3-8b"], num_tokens=700), many_programs=True)
    yield Case("many-tokens-R3-80-32", plain(MODELS["R3-80-32"], num_tokens=700), many_programs=True)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    for name in ("R8-smollm2", "R3-128-64", "R3-80", "256"):
        yield plain(MODELS[name], num_tokens=600)(device)
    yield plain(MODELS["R3-128-64"], FP32, num_tokens=600, interleaved=True)(device)
    yield plain(MODELS["R3-80-32"], FP16, num_tokens=600, interleaved=True)(device)
    smol = plain(MODELS["R8-smollm2"], num_tokens=600)(device)
    yield {**smol, "x": heads(device, 600, 9, 65)[..., 1:]}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    inputs = plain(Model(3, 2, 16, 8))(device)
    x, w, cache, at = (inputs[name] for name in ("x", "weight", "cos_sin_cache", "positions"))
    strided = heads(device, 3, 3, 32).transpose(0, 1)[..., :16]
    yield "rms_norm_rope", ops.rms_norm_rope.default, (x, w, cache, at, 1e-6, 0.0, False, False)
    yield "rms_norm_rope-strided", ops.rms_norm_rope.default, (strided, w.float(), cache, at, 1e-5, 1.0, True, True)
    yield "rms_norm_rope_out", ops.rms_norm_rope_out.default, (x, w, cache, at, 1e-6, 0.0, False, False, x.clone())


def _compiled(
    model: Model = MODELS["llama-3-8b"],
    dtype: torch.dtype = BF16,
    num_tokens: int = 8192,
    interleaved: bool = False,
    aligned: bool = True,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops import rope_triton

        num_heads, _, head_dim, rotary_dim = model
        sizes = (num_tokens, num_heads, 0, 0, head_dim, rotary_dim)
        device = torch.device("cuda", 0)
        desc = Desc(device, dtype, dtype, None, torch.int64, *sizes, interleaved, aligned, ())
        return rope_triton.specialize(desc, rope_triton.heuristic(desc), features)

    return specialize


COMPILED = {
    "bf16": Compiled(_compiled(), archs=(80, 90, 100)),
    "bf16-one-token": Compiled(_compiled(num_tokens=1), archs=(90,)),
    "bf16-smollm2": Compiled(_compiled(MODELS["R8-smollm2"]), archs=(90,)),
    "bf16-128-64": Compiled(_compiled(MODELS["R3-128-64"]), archs=(90,)),
    "bf16-interleaved": Compiled(_compiled(interleaved=True), archs=(90,)),
    "bf16-unaligned": Compiled(_compiled(aligned=False), archs=(90,), wide=False),
    "fp32": Compiled(_compiled(dtype=FP32), archs=(90,)),
}
