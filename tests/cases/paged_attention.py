"""Inputs of paged_attention that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, bits, normal
from cases.compile_facts import Compiled
from onepass.ops.accuracy import compare
from onepass.ops.paged_attention.op import Desc
from onepass.ops.paged_attention.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
FP8 = torch.float8_e4m3fn
NAN = float("nan")

Build = Callable[[torch.device], Inputs]


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (SPEC.reference(**upcast(inputs)),)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """The reference in the inputs' dtype: a stricter yardstick than the unfused ops, which take no NaN in a tail."""
    return (SPEC.reference(**inputs).contiguous(),)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "q"},)


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return SPEC.row_inputs


def plain(
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    dtype: torch.dtype = BF16,
    page_size: int = 16,
    q_len: int = 1,
    cache: torch.dtype | None = None,
    spare_pages: int = 1,
    **more: Any,
) -> Build:
    """One sequence for each length, its pages anywhere; what lies past a length is NaN, in the table a page far off."""

    def build(device: torch.device) -> Inputs:
        batch = len(lengths)
        needed = [-(-length // page_size) for length in lengths]
        num_pages = sum(needed) + 2
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(num_pages, generator=generator).int()
        table = torch.full((batch, max([*needed, 0]) + spare_pages), 2**31 - 1, dtype=torch.int32)
        shape = (num_pages, page_size, heads[1], dim)
        key_cache, value_cache = (normal(torch.device("cpu"), *shape, seed=seed) for seed in (1, 2))
        used = torch.zeros(num_pages, page_size, dtype=torch.bool)
        for sequence, (length, pages) in enumerate(zip(lengths, needed, strict=True)):
            table[sequence, :pages], order = order[:pages], order[pages:]
            keys = torch.arange(length)
            used[table[sequence, keys // page_size].long(), keys % page_size] = True
        for t in (key_cache, value_cache):
            t[~used] = NAN
        return {
            "q": normal(device, batch, q_len, heads[0], dim, dtype=dtype),
            "key_cache": key_cache.to(device, cache or dtype),
            "value_cache": value_cache.to(device, cache or dtype),
            "block_table": table.to(device),
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device).reshape(batch),
            **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in more.items()},
        }

    return build


def _changed(change: Callable[[Inputs], Inputs], base: Build) -> Build:
    def build(device: torch.device) -> Inputs:
        inputs = base(device)
        return {**inputs, **change(inputs)}

    return build


def _hnd(inputs: Inputs) -> Inputs:
    names = ("key_cache", "value_cache")
    return {**{name: inputs[name].transpose(1, 2).contiguous() for name in names}, "kv_layout": "HND"}


def _hnd_views(inputs: Inputs) -> Inputs:
    """NHD caches that lie in memory as HND."""
    return {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("key_cache", "value_cache")}


def _interleaved(inputs: Inputs) -> Inputs:
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    return {"key_cache": both[:, 0], "value_cache": both[:, 1]}


def _uneven(*names: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {name: inputs[name].transpose(-1, -2).contiguous().transpose(-1, -2) for name in names}


def _q_of_qkv(inputs: Inputs) -> Inputs:
    q = inputs["q"]
    return {"q": torch.cat((q, q), dim=2)[:, :, : q.shape[2]]}


def _shifted(inputs: Inputs) -> Inputs:
    t = inputs["key_cache"]
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return {"key_cache": memory[1:].view(t.shape).copy_(t)}


def _wrong_indices(inputs: Inputs) -> Inputs:
    """Sequences 0 to 3: a length below 0, one past the table, a page of -1, one past the cache. The last is right."""
    lengths, table = inputs["cache_seqlens"].clone(), inputs["block_table"].clone()
    lengths[0], lengths[1] = -1, table.shape[1] * inputs["key_cache"].shape[1] + 1
    table[2, 1], table[3, 2] = -1, inputs["key_cache"].shape[0]
    return {"cache_seqlens": lengths, "block_table": table}


def _freed_pages(inputs: Inputs) -> Inputs:
    """With a window, a cache may have given the pages before it away."""
    table = inputs["block_table"].clone()
    table[0, :5] = -1
    return {"block_table": table}


def _large(inputs: Inputs) -> Inputs:
    """Scores around 5000."""
    q = torch.full_like(inputs["q"], 40.0)
    return {"q": q, "key_cache": torch.where(inputs["key_cache"] > 0, 16.0, -16.0).to(q.dtype)}


def _sinks(n: int, value: float | None = None) -> Tensor:
    return normal(torch.device("cpu"), n) if value is None else torch.full((n,), value)


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain((100, 33, 600), dtype=dtype))
        yield Case(f"q-len-3-{NAMES[dtype]}", plain((100, 33), dtype=dtype, q_len=3))
        yield Case(f"float8-{NAMES[dtype]}", plain((100, 33), dtype=dtype, cache=FP8, k_scale=0.5, v_scale=2.0))
    for heads in ((28, 4), (24, 4), (64, 4), (14, 2), (9, 3), (32, 1), (3, 3)):
        yield Case(f"A1-{heads[0]}-{heads[1]}-heads", plain((40, 17), heads))
    yield Case("A2-tails", plain((32, 64, 96, 48), spare_pages=2))
    yield Case("A3-page-4-length-13", plain((13,), page_size=4))
    yield Case("A3-page-16-length-9", plain((9,)))
    yield Case("A3-one-page-too-many", plain((48,), spare_pages=1))
    yield Case("A3-boundaries", plain((63, 64, 65, 128, 255, 256, 257, 513), (2, 1), 16))
    yield Case("A4-one-empty", plain((20, 0, 300)))
    yield Case("A4-all-empty", plain((0, 0)))
    yield Case("A4-all-of-length-1", plain((1, 1, 1)))
    for dim in (1, 17, 80, 96, 128, 256):
        yield Case(f"A8-head-dim-{dim}", plain((70, 19), dim=dim))
    yield Case("A8-head-dim-256-fp32", plain((70, 19), dim=256, dtype=FP32))
    for page_size in (1, 3, 7, 64, 256):
        yield Case(f"page-{page_size}", plain((300, 5), (2, 1), 32, page_size=page_size))
    yield Case("A9-HND", _changed(_hnd, plain((100, 33))))
    yield Case("A9-HND-views", _changed(_hnd_views, plain((100, 33))))
    yield Case("A9-interleaved", _changed(_interleaved, plain((100, 33))))
    yield Case("A9-transposed-caches", _changed(_uneven("key_cache", "value_cache"), plain((100, 33))))
    yield Case("A9-transposed-values", _changed(_uneven("value_cache"), plain((100, 33))))
    yield Case("A9-transposed-q", _changed(_uneven("q"), plain((100, 33))))
    yield Case("A9-q-of-qkv", _changed(_q_of_qkv, plain((100, 33), q_len=2)))
    yield Case("N7-offset-1", _changed(_shifted, plain((100, 33))))
    yield Case("A10-window-2", plain((4, 300), (2, 1), 32, q_len=4, window_size=2))
    yield Case("A10-window-1", plain((4, 300), window_size=1))
    yield Case("A10-window-300", plain((700, 299, 300, 301), (2, 1), 32, window_size=300))
    yield Case("A10-freed-pages", _changed(_freed_pages, plain((300,), window_size=200)))
    yield Case("A11-q-longer-than-k", plain((2, 0, 5), q_len=5))
    yield Case("A11-q-len-40", plain((60, 333), q_len=40))
    yield Case("not-causal", plain((60, 333), (2, 1), 32, q_len=3, causal=False))
    yield Case("A12-softcap", _changed(_large, plain((60,), softcap=50.0, softmax_scale=1.0)))
    yield Case("softcap-fp32", plain((60, 333), dtype=FP32, softcap=5.0))
    yield Case("A13-sink-of-100", plain((60, 333), sinks=_sinks(4, 100.0)))
    yield Case("A13-only-sinks", plain((0, 3), sinks=_sinks(4)))
    yield Case("A13-sinks-bf16", plain((60, 333), (2, 1), 32, q_len=2, sinks=_sinks(2).bfloat16()))
    yield Case("sink-of-minus-infinity", plain((0, 60), sinks=_sinks(4, -float("inf"))))
    yield Case("softmax-scale", plain((60, 333), dtype=FP32, softmax_scale=0.3))
    yield Case("wrong-indices", _changed(_wrong_indices, plain((60, 60, 60, 60, 60))))
    yield Case("N5-no-sequences", plain((), spare_pages=3))
    yield Case("N5-no-queries", plain((60, 5), q_len=0))
    yield Case("no-pages", _changed(_no_pages, plain((0, 0))))
    yield Case("empty-table", _changed(lambda i: {"block_table": i["block_table"][:, :0]}, plain((0, 0))))
    yield Case("A7-length-33728", plain((33728, 5), (2, 1)), many_programs=True)
    yield Case("A7-page-70000", plain((70000,), (2, 1), 16, page_size=1), many_programs=True)


def _no_pages(inputs: Inputs) -> Inputs:
    return {name: inputs[name][:0] for name in ("key_cache", "value_cache")}


CASES = tuple(_cases())


def check_lse(inputs: Inputs) -> None:
    """The result is the same with its lse, which is as close to float64 as the reference's in float32."""
    out, lse = SPEC.fused(**inputs, return_lse=True)
    assert torch.equal(bits(out), bits(SPEC.fused(**inputs)))
    assert (lse.dtype, lse.is_contiguous()) == (FP32, True)
    _, eager_lse = SPEC.reference(**inputs, return_lse=True)
    _, truth = SPEC.reference(**upcast(inputs), return_lse=True)
    accuracy = compare(lse, eager_lse, truth)
    assert accuracy.ok, accuracy
    work = torch.full((2 * inputs["q"].numel() * 100 + 16,), NAN, device=out.device)
    with_memory = SPEC.fused(**inputs, return_lse=True, workspace=work[:-16], out=torch.empty_like(out))
    assert torch.equal(bits(with_memory[0]), bits(out))
    assert torch.equal(bits(with_memory[1]), bits(lse))
    assert bool(work[-16:].isnan().all())


def check_65536_sequences(device: torch.device) -> None:
    """A6. One key each, so the result is its value: the reference takes a sequence at a time."""
    batch, heads, dim = 65536, 2, 8
    key_cache, value_cache = (normal(device, batch, 1, heads, dim, dtype=BF16, seed=seed) for seed in (1, 2))
    table = torch.randperm(batch, generator=torch.Generator().manual_seed(3)).int().to(device)
    lengths = torch.ones(batch, dtype=torch.int32, device=device)
    q = normal(device, batch, 1, heads, dim, dtype=BF16)
    out = SPEC.fused(q, key_cache, value_cache, table[:, None], lengths)
    assert torch.equal(out, value_cache[table.long()])


def batches(device: torch.device) -> Iterator[Inputs]:
    """A14. Lengths of every kind in one batch; the table is as wide as the longest needs, alone or not."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 1500, (256,), generator=generator).tolist()
    yield plain(lengths, (4, 2), 32)(device)
    yield plain([1, 257, 0, 2000, 33] * 4, (9, 3), 64, FP32, q_len=3, window_size=700)(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    inputs = plain((40, 7), dim=24, q_len=2)(device)
    q = inputs["q"]
    values = (True, None, None, None, "NHD", 1.0, 1.0)
    call = (*inputs.values(), None, *values)
    yield "paged_attention", ops.paged_attention.default, call
    yield "paged_attention_lse", ops.paged_attention_lse.default, call
    sinks = _sinks(4).to(device)
    more = (*inputs.values(), sinks, True, 0.5, 20, 3.0, "NHD", 1.0, 1.0)
    lse = torch.empty(2, 4, 2, device=device)
    work = torch.empty(4 * 4 * 26 * 2, device=device)
    yield "paged_attention_out", ops.paged_attention_out.default, (*more, torch.empty_like(q), lse, work)
    yield "paged_attention_out-alone", ops.paged_attention_out.default, (*call, torch.empty_like(q), None, None)


def desc(
    batch: int = 1,
    length: int = 8192,
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    dtype: torch.dtype = BF16,
    q_len: int = 1,
    page_size: int = 16,
    cache: torch.dtype | None = None,
    aligned: bool = True,
    options: bool = False,
) -> Desc:
    """Of a call on a GPU; with `options` a window, a soft cap, sinks and the lse."""
    max_pages = -(-length // page_size)
    device, sinks = torch.device("cuda", 0), FP32 if options else None
    sizes = (batch, q_len, *heads, dim, batch * max_pages, page_size, max_pages)
    return Desc(device, dtype, cache or dtype, sinks, *sizes, True, options, options, options, aligned, ())


def _compiled(merge: bool = False, **sizes: Any) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.paged_attention import kernel_triton
        from onepass.ops.paged_attention.config import heuristic

        made = desc(**sizes)
        function = kernel_triton.specialize_merge if merge else kernel_triton.specialize
        return function(made, heuristic(made), features)

    return specialize


COMPILED = {
    "bf16": Compiled(_compiled()),
    "bf16-merge": Compiled(_compiled(merge=True), wide=False),
    "bf16-many": Compiled(_compiled(batch=64), (80, 90)),
    "bf16-many-merge": Compiled(_compiled(batch=64, merge=True), (90,), wide=False),
    "bf16-direct": Compiled(_compiled(length=256), (90,), wide=False),
    "fp32": Compiled(_compiled(dtype=FP32), (86, 90)),
    "bf16-256": Compiled(_compiled(dim=256), (86, 90)),
    "fp32-256": Compiled(_compiled(dim=256, dtype=FP32), (86, 90)),
    "bf16-80": Compiled(_compiled(dim=80), (90,)),
    "bf16-options": Compiled(_compiled(options=True), (90,)),
    "bf16-prefill": Compiled(_compiled(q_len=512), (86, 90)),
    "bf16-float8": Compiled(_compiled(cache=FP8), (89, 90)),
    "bf16-unaligned": Compiled(_compiled(aligned=False), (90,), wide=False),
}
