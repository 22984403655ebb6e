"""Inputs of flash_attention that broke other libraries (A1 to A15), and their siblings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import ARCHS, Compiled
from onepass.ops.flash_attention import reference, spec
from onepass.ops.flash_attention.op import Desc, flash_attention_varlen
from onepass.ops.spec import Inputs, upcast

LOOPS = True
"""Every case runs a loop of the Triton kernel, which not every version's interpreter can."""

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}

# The lse has no output argument, and rows of no sequence have no result: these forms have tests of their own.
SPEC = replace(
    spec.SPEC,
    allocate_out=lambda inputs: {} if inputs.get("return_lse") or is_varlen(inputs) else spec.SPEC.allocate_out(inputs),
)


def is_varlen(inputs: Inputs) -> bool:
    return "cu_seqlens_q" in inputs


def function(inputs: Inputs) -> Callable[..., Any]:
    return flash_attention_varlen if is_varlen(inputs) else SPEC.fused


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out", "lse") if inputs.get("return_lse") else ("out",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    compute = reference.flash_attention_varlen if is_varlen(inputs) else SPEC.reference
    return as_tuple(compute(**upcast(inputs)))


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """The unfused ops, of one packed sequence after the other, with zeros where a row sees no key."""
    if not is_varlen(inputs):
        return _eager(inputs)
    packed = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options = {name: value for name, value in inputs.items() if name not in packed}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=FP32)
    bounds = zip(*(inputs[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")), strict=True)
    starts = list(bounds)
    for (q0, k0), (q1, k1) in itertools.pairwise(starts):
        results = _eager({"q": q[None, q0:q1], "k": k[None, k0:k1], "v": v[None, k0:k1], **options})
        out[q0:q1] = results[0][0]
        if len(results) == 2:
            lse[:, q0:q1] = results[1][0]
    return (out, lse) if inputs.get("return_lse") else (out,)


def _eager(inputs: Inputs) -> tuple[Tensor, ...]:
    out, lse = SPEC.unfused(**{**inputs, "return_lse": True})
    if inputs["k"].shape[1] == 0 and inputs.get("sinks") is None:
        return (torch.zeros_like(out), torch.full_like(lse, -math.inf))[: len(outputs(inputs))]
    out = out.masked_fill((lse == -math.inf).transpose(1, 2)[..., None], 0.0)
    return (out, lse)[: len(outputs(inputs))]


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "q"},)


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return () if is_varlen(inputs) else ("q", "k", "v")


def qkv(
    device: torch.device,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = BF16,
) -> Inputs:
    num_q_heads, num_kv_heads = heads
    return {
        "q": normal(device, batch, seqlen_q, num_q_heads, head_dim, dtype=dtype),
        "k": normal(device, batch, seqlen_k, num_kv_heads, head_dim, dtype=dtype, seed=1),
        "v": normal(device, batch, seqlen_k, num_kv_heads, head_dim, dtype=dtype, seed=2),
    }


def packed(
    device: torch.device,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = BF16,
    index: torch.dtype = torch.int32,
) -> Inputs:
    """Sequences one after the other."""
    rows = {name: t[0] for name, t in qkv(device, 1, sum(lengths_q), sum(lengths_k), heads, head_dim, dtype).items()}
    return {
        **rows,
        "cu_seqlens_q": bounds(device, lengths_q, index),
        "cu_seqlens_k": bounds(device, lengths_k, index),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }


def bounds(device: torch.device, lengths: tuple[int, ...], index: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(device, index)


def _dense(name: str, *sizes: Any, many_programs: bool = False, **options: Any) -> Case:
    def build(device: torch.device) -> Inputs:
        made = {key: value(device) if callable(value) else value for key, value in options.items()}
        return {**qkv(device, *sizes), **made}

    return Case(name, build, many_programs)


def _packed(name: str, *sizes: Any, **options: Any) -> Case:
    return Case(name, lambda device: {**packed(device, *sizes), **options})


def _sinks(*values: float, dtype: torch.dtype = FP32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, dtype=dtype, device=device)


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield _dense(f"causal-{NAMES[dtype]}", 2, 70, 150, (2, 1), 64, dtype, causal=True, return_lse=True)
        yield _dense(f"plain-{NAMES[dtype]}", 1, 130, 70, (2, 2), 64, dtype)
    for heads in ((28, 4), (24, 4), (64, 4), (14, 2), (9, 3), (32, 1)):
        many = heads[0] > 28
        yield _dense(f"A1-heads-{heads[0]}-{heads[1]}", 1, 3, 20, heads, 16, many_programs=many, causal=True)
    for head_dim in (1, 33, 72, 80, 96, 128, 256):
        dtype = {96: FP16, 33: FP32, 256: BF16}.get(head_dim, BF16)
        yield _dense(f"A8-head-dim-{head_dim}", 1, 33, 70, (2, 1), head_dim, dtype, causal=True, return_lse=True)
    yield _dense("A8-head-dim-256-fp32", 1, 5, 40, (2, 1), 256, FP32, causal=True)
    yield from _lengths()
    yield from _layouts()
    yield from _options()


def _lengths() -> Iterator[Case]:
    yield Case("A2-packed-before-nan", _packed_before_nan)
    yield _packed("A4-packed-empty-and-1", (3, 0, 1, 1), (3, 2, 0, 1), (4, 2), 64, causal=True, return_lse=True)
    yield _dense("A4-one-token", 3, 1, 1, (4, 2), 64, causal=True, return_lse=True)
    yield _dense("A6-65536-sequences", 65536, 1, 2, (1, 1), 8, many_programs=True, causal=True)
    yield _dense("A6-65568-heads", 2049, 1, 1, (32, 32), 8, many_programs=True)
    yield _packed("A11-packed-0-1-0-1", (0, 1, 0, 1), (2, 3, 4, 5), (2, 1), 64, causal=True, return_lse=True)
    yield _packed("A11-packed-more-queries", (5, 40, 2), (3, 7, 150), (2, 2), 64, FP32, causal=True, return_lse=True)
    yield _packed("packed-int64", (5, 140, 2), (3, 70, 40), (2, 1), 64, FP16, torch.int64, window_size=(5, 2))
    yield _dense("A11-no-keys", 2, 3, 0, (2, 1), 64, return_lse=True)
    yield _dense("A11-more-queries", 1, 40, 7, (2, 1), 64, causal=True, return_lse=True)
    for name, sizes in {"sequences": (0, 3, 3), "queries": (2, 0, 3)}.items():
        yield _dense(f"no-{name}", *sizes, (2, 1), 64, causal=True)


def _layouts() -> Iterator[Case]:
    def heads_first(device: torch.device, *names: str) -> Inputs:
        inputs = qkv(device, 2, 40, 40, (4, 2), 64)
        return {n: t.transpose(1, 2).contiguous().transpose(1, 2) if n in names else t for n, t in inputs.items()}

    yield Case("A9-heads-first", lambda d: {**heads_first(d, "q", "k", "v"), "causal": True})
    yield Case("A9-v-heads-first", lambda d: {**heads_first(d, "v"), "causal": True})
    yield Case("A9-packed-qkv", lambda d: _qkv_slices(normal(d, 2, 40, 8, 64, dtype=BF16)))
    yield Case("A9-packed-qkv-odd-stride", lambda d: _qkv_slices(normal(d, 2, 40, 8, 67, dtype=BF16)[..., 1:65]))
    yield Case("A9-last-dimension-strided", lambda d: _qkv_slices(normal(d, 2, 40, 8, 128, dtype=BF16)[..., ::2]))
    yield Case("A9-tokens-first", lambda d: _qkv_slices(normal(d, 40, 2, 8, 64, dtype=FP16).transpose(0, 1)))
    yield Case("A9-one-key-for-all", _expanded_keys)


def _options() -> Iterator[Case]:
    yield _dense("A10-window-2", 1, 4, 4, (2, 2), 16, FP32, causal=True, window_size=2)
    yield _dense("A10-window-2-0", 1, 4, 4, (2, 2), 16, FP32, window_size=(2, 0), return_lse=True)
    yield _dense("window-both-sides", 1, 150, 200, (2, 1), 64, window_size=(30, 9), return_lse=True)
    yield _dense("window-left-only", 1, 70, 200, (2, 1), 64, FP16, window_size=(3, -1))
    yield _dense("window-right-only", 1, 70, 50, (2, 1), 64, window_size=(-1, 4), return_lse=True)
    yield _dense("window-causal", 1, 200, 200, (2, 1), 64, causal=True, window_size=40)
    yield _dense("A12-soft-cap", 1, 40, 70, (2, 1), 64, causal=True, softcap=50.0, softmax_scale=60.0)
    yield _dense("soft-cap-small-scores", 1, 40, 70, (2, 1), 64, FP32, softcap=30.0, return_lse=True)
    sinks = _sinks(100.0, -2.0, -math.inf, 0.5)
    yield _dense("A13-sinks", 1, 40, 70, (4, 2), 64, causal=True, sinks=sinks, return_lse=True)
    yield _dense("sinks-bf16", 1, 3, 70, (2, 2), 64, FP32, sinks=_sinks(1.0, -1.0, dtype=BF16))
    yield _dense("A13-no-keys-but-sinks", 1, 20, 7, (4, 2), 64, causal=True, sinks=sinks, return_lse=True)
    for scale in (-0.3, 0.0, 4.0):
        yield _dense(f"scale-{scale}", 1, 40, 70, (2, 1), 64, FP32, causal=True, softmax_scale=scale, return_lse=True)
    yield Case("nan-in-q", _nan_in_q)


def _packed_before_nan(device: torch.device) -> Inputs:
    """The rows behind the sequences hold NaN, and so does a whole sequence in the middle."""
    lengths = (32, 64, 5, 96, 48)
    inputs = packed(device, (7, 64, 2, 3, 48), lengths, (2, 1), 64)
    inputs["q"][71:73] = math.nan
    for name in ("k", "v"):
        rows = torch.full((300, 1, 64), math.nan, dtype=BF16, device=device)
        rows[: sum(lengths)] = inputs[name]
        rows[96:101] = math.nan
        inputs[name] = rows
    return {**inputs, "causal": True}


def _qkv_slices(heads: Tensor) -> Inputs:
    """Four heads of q and two each of k and v, side by side in one tensor."""
    q, k, v = heads.split((4, 2, 2), dim=2)
    return {"q": q, "k": k, "v": v, "causal": True}


def _expanded_keys(device: torch.device) -> Inputs:
    inputs = qkv(device, 3, 20, 20, (2, 2), 64)
    return {name: t if name == "q" else t[:1, :, :1].expand(3, -1, 2, -1) for name, t in inputs.items()}


def _nan_in_q(device: torch.device) -> Inputs:
    inputs = qkv(device, 1, 40, 70, (2, 1), 64)
    inputs["q"][0, 3, 1, 5] = math.nan
    return {**inputs, "causal": True, "return_lse": True}


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    """A14."""
    yield {**qkv(device, 256, 3, 40, (4, 2), 64), "causal": True}
    yield {**qkv(device, 18, 70, 70, (2, 1), 80, FP32), "window_size": (20, 3), "return_lse": True}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    dense, varlen = qkv(device, 2, 5, 7, (4, 2), 16), packed(device, (5, 2), (3, 7), (4, 2), 16)
    sinks = _sinks(1.0, 2.0, 3.0, 4.0)(device)
    options = (True, None, -1, -1, None)
    q, k, v = dense.values()
    out, lse = torch.empty_like(q), torch.empty(2, 4, 5, device=device)
    plain = (q, k, v, None, None, None, 0, 0, *options)
    yield "flash_attention", ops.flash_attention.default, plain
    yield (
        "flash_attention-options",
        ops.flash_attention.default,
        (q, k, v, sinks, None, None, 0, 0, False, 0.5, 3, 1, 9.0),
    )
    yield "flash_attention_lse", ops.flash_attention_lse.default, plain
    yield "flash_attention_out", ops.flash_attention_out.default, (*plain, out)
    yield "flash_attention_lse_out", ops.flash_attention_lse_out.default, (*plain, out, lse)
    q, k, v, cu_q, cu_k, max_q, max_k = varlen.values()
    out, lse = torch.zeros_like(q), torch.zeros(4, 7, device=device)
    plain = (q, k, v, sinks, cu_q, cu_k, max_q, max_k, *options)
    yield "flash_attention-varlen", ops.flash_attention.default, plain
    yield "flash_attention_lse-varlen", ops.flash_attention_lse.default, plain
    yield "flash_attention_lse_out-varlen", ops.flash_attention_lse_out.default, (*plain, out, lse)


def _compiled(head_dim: int, dtype: torch.dtype, **changes: Any) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.flash_attention import kernel_triton

        desc = Desc(
            device=torch.device("cuda", 0),
            dtype=dtype,
            batch=1,
            seqlen_q=4096,
            seqlen_k=4096,
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=head_dim,
            softmax_scale=head_dim**-0.5,
            left=-1,
            right=0,
            softcap=None,
            sinks_dtype=None,
            index_dtype=None,
            total_q=4096,
            total_k=4096,
            has_lse=False,
            aligned=True,
            far_rows=False,
            copied=(),
        )
        return kernel_triton.specialize(desc._replace(**changes), features)

    return specialize


_PACKED = {"sinks_dtype": BF16, "index_dtype": torch.int32, "has_lse": True}
_EVERYTHING = {**_PACKED, "left": 1023, "softcap": 50.0}
_SHARED_MEMORY = (80, 86, 90, "gfx942")
"""One architecture for each limit of shared memory."""

COMPILED = {
    "bf16-128": Compiled(_compiled(128, BF16), archs=ARCHS),
    "fp32-128": Compiled(_compiled(128, FP32), archs=_SHARED_MEMORY),
    "bf16-64": Compiled(_compiled(64, BF16), archs=(86, 90)),
    "bf16-256": Compiled(_compiled(256, BF16), archs=_SHARED_MEMORY),
    "fp32-256": Compiled(_compiled(256, FP32), archs=(86, 90, "gfx942")),
    "fp32-64": Compiled(_compiled(64, FP32), archs=(90,)),
    "bf16-80": Compiled(_compiled(80, BF16), archs=(90,)),
    "fp16-96": Compiled(_compiled(96, FP16), archs=(90,)),
    "bf16-128-sinks-lse": Compiled(_compiled(128, BF16, sinks_dtype=BF16, has_lse=True), archs=(90,)),
    "bf16-128-packed": Compiled(_compiled(128, BF16, **_PACKED), archs=(90,)),
    "bf16-128-everything": Compiled(_compiled(128, BF16, **_EVERYTHING), archs=(86, 90)),
    "bf16-128-unaligned": Compiled(_compiled(128, BF16, aligned=False), archs=(86, 90), narrow=2),
    "bf16-128-far-rows": Compiled(_compiled(128, BF16, far_rows=True), archs=(90,)),
}
