"""Inputs of append_kv that broke other libraries, and their siblings. A result here is what a token's slot holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import onepass
from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.append_kv.op import Desc
from onepass.ops.append_kv.reference import append_kv as reference
from onepass.ops.append_kv.spec import SPEC
from onepass.ops.spec import Inputs

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
FP8 = torch.float8_e4m3fn


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("key", "value")


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Values are copied, or rounded once: the result is exact."""
    return (None, None)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    return _held(reference, **inputs)


def function(inputs: Inputs) -> Callable[..., Any]:
    return append_kv


def append_kv(**inputs: Any) -> tuple[Tensor, ...]:
    """The op on copies of the caches, and then what each token's slot holds."""
    return _held(onepass.append_kv, **inputs)


def _held(append: Callable[..., None], key_cache: Tensor, value_cache: Tensor, **others: Any) -> tuple[Tensor, ...]:
    copies = [t.new_empty_strided(t.shape, t.stride()).copy_(t) for t in (key_cache, value_cache)]
    append(key_cache=copies[0], value_cache=copies[1], **others)
    slots = others["slot_mapping"]
    if key_cache.numel() == 0:
        return tuple(torch.zeros_like(others[name]) for name in ("k", "v"))
    rows = [(t if others.get("kv_layout") != "HND" else t.transpose(1, 2)).float().flatten(0, 1) for t in copies]
    there = (slots >= 0) & (slots < len(rows[0]))
    return tuple((row[slots * there] * there[:, None, None]).contiguous() for row in rows)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return ("k", "v", "slot_mapping")


def caches(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Not zero, so that a skipped token shows."""
    return (
        normal(device, *shape, seed=10).to(dtype),
        normal(device, *shape, seed=11).to(dtype),
    )


def plain(
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    cache: torch.dtype | None = None,
    **more: Any,
) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        num_pages = 2 * -(-tokens // page_size)
        key_cache, value_cache = caches(device, num_pages, page_size, heads, dim, dtype=cache or dtype)
        generator = torch.Generator().manual_seed(3)
        slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens].to(device)
        return {
            "k": normal(device, tokens, heads, dim, dtype=dtype, scale=3.0),
            "v": normal(device, tokens, heads, dim, dtype=dtype, seed=1),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slots,
            **more,
        }

    return build


def _changed(change: Callable[[Inputs], Inputs], base: Callable[[torch.device], Inputs]) -> Callable[..., Inputs]:
    def build(device: torch.device) -> Inputs:
        inputs = base(device)
        return {**inputs, **change(inputs)}

    return build


def _hnd(inputs: Inputs) -> Inputs:
    names = ("key_cache", "value_cache")
    return {**{name: inputs[name].transpose(1, 2).contiguous() for name in names}, "kv_layout": "HND"}


def _interleaved(inputs: Inputs) -> Inputs:
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    return {"key_cache": both[:, 0], "value_cache": both[:, 1]}


def _qkv_slices(inputs: Inputs) -> Inputs:
    k, v = inputs["k"], inputs["v"]
    qkv = torch.cat((k, k, v), dim=1)
    return {"k": qkv[:, k.shape[1] : 2 * k.shape[1]], "v": qkv[:, 2 * k.shape[1] :]}


def _uneven(name: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {name: inputs[name].transpose(-1, -2).contiguous().transpose(-1, -2)}


def _special(inputs: Inputs) -> Inputs:
    """Numbers around the edges of float8_e4m3fn, which has none above 448 and none but 0 below 2^-10."""
    edges = [float("nan"), float("inf"), -float("inf"), 448.0, 464.0, 465.0, -1000.0, 0.0, -0.0]
    edges += [2.0**-9, 2.0**-10, 1.01 * 2.0**-10, 3 * 2.0**-10, 2.0**-6, 0.99 * 2.0**-6, 17.0, 19.0]
    k = inputs["k"].clone()
    k.view(-1)[: len(edges)] = torch.tensor(edges, dtype=k.dtype)
    return {"k": k, "v": -k}


def _slots(*slots: int) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {"slot_mapping": torch.tensor(slots, device=inputs["k"].device)}


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain(17, 8, 128, dtype))
        yield Case(f"float8-{NAMES[dtype]}", plain(17, 8, 128, dtype, cache=FP8, k_scale=0.7, v_scale=2.0))
        yield Case(f"float8-edges-{NAMES[dtype]}", _changed(_special, plain(4, 2, 40, dtype, cache=FP8)))
    yield Case("R8-3x64", plain(17, 3, 64, BF16))
    yield Case("R4-one-head", plain(17, 1, 80, BF16))
    for dim in (1, 17, 96, 256):
        yield Case(f"head-dim-{dim}", plain(5, 3, dim, FP16))
    yield Case("many-heads", plain(3, 40, 128, BF16))
    for page_size in (1, 7, 256):
        yield Case(f"page-{page_size}", plain(33, 2, 32, BF16, page_size))
    yield Case("R7-bad-slots", _changed(_slots(-1, 32, 0, 31, -(2**62), 2**62, 7), plain(7, 8, 64, BF16)))
    yield Case("A9-HND", _changed(_hnd, plain(17, 8, 64, BF16)))
    yield Case("A9-HND-float8", _changed(_hnd, plain(17, 8, 64, BF16, cache=FP8)))
    yield Case("A9-interleaved", _changed(_interleaved, plain(17, 8, 64, BF16)))
    yield Case("A9-qkv-slices", _changed(_qkv_slices, plain(17, 8, 64, BF16)))
    for name in ("k", "v", "key_cache", "value_cache"):
        yield Case(f"A9-{name}-transposed", _changed(_uneven(name), plain(17, 8, 64, BF16)))
    yield Case("N7-offset-1", _changed(lambda i: {"k": _shifted(i["k"])}, plain(17, 8, 64, BF16)))
    yield Case("N5-no-tokens", plain(0, 8, 64, BF16))
    yield Case("N5-no-heads", plain(3, 0, 64, BF16))
    yield Case("no-pages", _changed(_no_pages, plain(3, 2, 64, BF16)))
    yield Case("N14-65537-tokens", plain(65537, 1, 8, BF16), many_programs=True)


def _no_pages(inputs: Inputs) -> Inputs:
    return {name: inputs[name][:0] for name in ("key_cache", "value_cache")}


def _shifted(t: Tensor) -> Tensor:
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    yield plain(257, 3, 64, BF16)(device)
    yield plain(65, 2, 40, FP32, cache=FP8)(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    op = torch.ops.onepass.append_kv.default
    for name, inputs in (
        ("append_kv", plain(5, 2, 24, BF16)(device)),
        ("append_kv-HND", _changed(_hnd, plain(5, 2, 24, BF16))(device)),
    ):
        layout = inputs.pop("kv_layout", "NHD")
        yield name, op, (*inputs.values(), layout, 1.0, 1.0)


def _compiled(tokens: int, dtype: torch.dtype, cache: torch.dtype, aligned: bool = True) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.append_kv import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, cache, tokens, 8, 128, 100, 16, aligned, ())
        return kernel_triton.specialize(desc, features)

    return specialize


COMPILED = {
    **{NAMES[dtype]: Compiled(_compiled(64, dtype, dtype)) for dtype in (BF16, FP32)},
    "bf16-many": Compiled(_compiled(1 << 20, BF16, BF16), (90,)),
    "bf16-float8": Compiled(_compiled(64, BF16, FP8), (89, 90, 100, 120, "gfx942"), wide=False),
    "bf16-unaligned": Compiled(_compiled(64, BF16, BF16, aligned=False), (90,), wide=False),
}
