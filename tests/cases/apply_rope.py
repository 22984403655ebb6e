"""Inputs of apply_rope that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case
from cases.compile_facts import Compiled
from cases.rope_inputs import (
    BAD,
    LLAMA,
    MODELS,
    NAMES,
    SMOL,
    Model,
    heads,
    layouts,
    positions,
    special,
    table,
)
from onepass.ops.apply_rope.spec import SPEC
from onepass.ops.rope_call import Desc
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return "q_out", "k_out"


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    truth: tuple[Tensor, ...] = SPEC.reference(**upcast(inputs))
    return truth


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """In float32 and rounded once: stricter than models, which round the angles' cosines (R5)."""
    result: tuple[Tensor, ...] = SPEC.reference(**inputs)
    return result


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return {"q_out": "q"}, {"k_out": "k"}, {"q_out": "q", "k_out": "k"}


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return "q", "k", "positions"


def plain(
    model: Model,
    dtype: torch.dtype = BF16,
    num_tokens: int = 3,
    interleaved: bool = False,
    position_dtype: torch.dtype = torch.int64,
) -> Callable[[torch.device], Inputs]:
    num_q_heads, num_kv_heads, head_dim, rotary_dim = model

    def build(device: torch.device) -> Inputs:
        return {
            "q": heads(device, num_tokens, num_q_heads, head_dim, dtype=dtype),
            "k": heads(device, num_tokens, num_kv_heads, head_dim, dtype=dtype, seed=1),
            "cos_sin_cache": table(device, rotary_dim),
            "positions": positions(device, num_tokens, position_dtype),
            "interleaved": interleaved,
        }

    return build


def _changed(build: Callable[[torch.device], Inputs], **changes: Callable[[torch.device], Any]) -> Any:
    return lambda device: {**build(device), **{name: make(device) for name, make in changes.items()}}


def _cases() -> Iterator[Case]:
    for name, model in MODELS.items():
        yield Case(name, plain(model))
        yield Case(f"R6-{name}-interleaved", plain(model, interleaved=True))
    for dtype in (FP16, FP32):
        for name in ("R8-smollm2", "R3-128-64", "R3-80-32", "7-4"):
            yield Case(f"{name}-{NAMES[dtype]}", plain(MODELS[name], dtype, position_dtype=torch.int32))
            yield Case(f"R6-{name}-{NAMES[dtype]}-interleaved", plain(MODELS[name], dtype, interleaved=True))
    for dtype in (torch.int32, torch.int64):  # R1
        yield Case(f"R1-{dtype}", plain(SMOL, num_tokens=17, position_dtype=dtype))
        every_other = _changed(plain(SMOL), positions=lambda d, dtype=dtype: positions(d, 6, dtype)[::2])
        yield Case(f"R1-{dtype}-strided", every_other)
        one_in = _changed(plain(SMOL), positions=lambda d, dtype=dtype: positions(d, 4, dtype)[1:])
        yield Case(f"R1-{dtype}-offset-1", one_in)
    yield Case("R1-expanded", _changed(plain(SMOL), positions=lambda d: positions(d, 1).expand(3)))
    for name, (values, dtype) in BAD.items():
        for interleaved in (False, True):
            wrong = _changed(
                plain(MODELS["R3-128-64"], num_tokens=len(values), interleaved=interleaved),
                positions=lambda d, v=values, t=dtype: torch.tensor(v, dtype=t, device=d),
            )
            yield Case(f"{name}-interleaved" if interleaved else name, wrong)
    no_table = _changed(plain(SMOL), cos_sin_cache=lambda d: table(d, 64, max_position=0))
    yield Case("R2-empty-table", no_table)
    yield Case("R5-fp32", _changed(plain(SMOL, FP32), positions=lambda d: torch.arange(256, 259, device=d)))
    yield Case("R5-bf16", _changed(plain(SMOL), positions=lambda d: torch.arange(256, 259, device=d)))

    for name, make in layouts(3, 9, 64):
        tokens = 1 if "one-token" in name else 3
        yield Case(f"{name}-q", _changed(plain(SMOL, num_tokens=tokens), q=make))
    for name, make in layouts(3, 3, 64):
        tokens = 1 if "one-token" in name else 3
        yield Case(f"{name}-k", _changed(plain(SMOL, num_tokens=tokens, interleaved=True), k=make))
    yield Case("N4-qkv-slices", _qkv_slices)
    wide = _changed(plain(SMOL), cos_sin_cache=lambda d: table(d, 128)[:, 16:80])
    yield Case("N4-table-slice", wide)
    yield Case("N4-table-transposed", _changed(plain(SMOL), cos_sin_cache=lambda d: table(d, 64).t().contiguous().t()))
    yield Case("N7-table-odd-stride", _changed(plain(SMOL), cos_sin_cache=lambda d: table(d, 66)[:, 1:65]))

    yield Case("N5-no-tokens", plain(SMOL, num_tokens=0))
    yield Case("N5-no-kv-heads", plain(Model(3, 0, 64, 64)))
    yield Case("N5-no-q-heads", plain(Model(0, 3, 64, 64)))
    for dtype in (BF16, FP16, FP32):
        yield Case(f"special-{NAMES[dtype]}", _special(dtype))
    yield Case("N14-65537-tokens", plain(Model(2, 1, 8, 8), num_tokens=65537), many_programs=True)
    yield Case("many-tokens", plain(LLAMA, num_tokens=700), many_programs=True)
    yield Case("many-tokens-R3-80-32", plain(MODELS["R3-80-32"], num_tokens=700), many_programs=True)
    yield Case("many-tokens-smollm2", plain(SMOL, num_tokens=701, interleaved=True), many_programs=True)


def _qkv_slices(device: torch.device) -> Inputs:
    """q and k as they come out of one product, in one memory."""
    qkv = heads(device, 3, 15 * 64)
    return {
        **plain(SMOL)(device),
        "q": qkv[:, : 9 * 64].unflatten(1, (9, 64)),
        "k": qkv[:, 9 * 64 : 12 * 64].unflatten(1, (3, 64)),
    }


def _special(dtype: torch.dtype) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        inputs = plain(MODELS["R3-128-64"], dtype, num_tokens=8)(device)
        special(inputs["q"])
        special(inputs["k"])
        return inputs

    return build


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    for model in (SMOL, MODELS["R3-128-64"], MODELS["R3-80"]):
        yield plain(model, num_tokens=600)(device)
    yield plain(SMOL, FP32, num_tokens=600, interleaved=True)(device)
    yield {**plain(SMOL, num_tokens=600)(device), "q": heads(device, 600, 9, 65)[..., 1:]}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    inputs = plain(Model(3, 2, 16, 8))(device)
    q, k, cache, at = (inputs[name] for name in ("q", "k", "cos_sin_cache", "positions"))
    strided = heads(device, 3, 3, 32).transpose(0, 1)[..., :16]
    yield "apply_rope", ops.apply_rope.default, (q, k, cache, at, False, False)
    yield "apply_rope-strided", ops.apply_rope.default, (strided, k, cache, at.int(), True, True)
    out = (torch.empty_like(q), torch.empty_like(k))
    yield "apply_rope_out", ops.apply_rope_out.default, (q, k, cache, at, False, False, *out)


def _compiled(
    model: Model = LLAMA,
    dtype: torch.dtype = BF16,
    num_tokens: int = 8192,
    interleaved: bool = False,
    aligned: bool = True,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops import rope_triton

        num_q_heads, num_kv_heads, head_dim, rotary_dim = model
        sizes = (num_tokens, num_q_heads, num_kv_heads, 0, head_dim, rotary_dim)
        device = torch.device("cuda", 0)
        desc = Desc(device, dtype, None, None, torch.int64, *sizes, interleaved, aligned, ())
        return rope_triton.specialize(desc, rope_triton.heuristic(desc), features)

    return specialize


COMPILED = {
    "bf16": Compiled(_compiled()),
    "bf16-one-token": Compiled(_compiled(num_tokens=1), archs=(90,)),
    "bf16-smollm2": Compiled(_compiled(SMOL), archs=(90,)),
    "bf16-interleaved": Compiled(_compiled(interleaved=True), archs=(80, 90, "gfx942")),
    "bf16-128-64": Compiled(_compiled(MODELS["R3-128-64"]), archs=(90,)),
    "bf16-80-32": Compiled(_compiled(MODELS["R3-80-32"]), archs=(90,)),
    "bf16-96": Compiled(_compiled(MODELS["R3-96"]), archs=(90,)),
    "bf16-unaligned": Compiled(_compiled(aligned=False), archs=(90,), wide=False),
    "fp16": Compiled(_compiled(dtype=FP16), archs=(90,)),
    "fp32": Compiled(_compiled(dtype=FP32), archs=(80, 90)),
    "fp32-interleaved": Compiled(_compiled(dtype=FP32, interleaved=True), archs=(90,)),
}
