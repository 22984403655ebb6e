"""Inputs of qkv_proj that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, clone_inputs, normal
from cases.compile_facts import Compiled
from cases.rope_inputs import LLAMA, MODELS, NAMES, SMOL, Model, positions, table
from onepass.ops.qkv_proj.op import Desc
from onepass.ops.qkv_proj.spec import SPEC as OP_SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

CACHES = ("key_cache", "value_cache")
PAGE_SIZE = 4


def qkv_proj(key_cache_out: Tensor | None = None, value_cache_out: Tensor | None = None, **inputs: Any) -> Any:
    """The op on copies of its caches, which are then results like the others: the checks can say what they must be."""
    if inputs.get("key_cache") is None:
        return OP_SPEC.fused(**inputs)
    caches = {name: clone_inputs({name: inputs[name]})[name] for name in CACHES}
    results = OP_SPEC.fused(**{**inputs, **caches})
    appended = (caches["key_cache"].contiguous(), caches["value_cache"].contiguous())
    if key_cache_out is not None and value_cache_out is not None:
        appended = (key_cache_out.copy_(appended[0]), value_cache_out.copy_(appended[1]))
    return (*results, *appended)


SPEC = replace(OP_SPEC, fused=qkv_proj)


def outputs(inputs: Inputs) -> tuple[str, ...]:
    names = ("q_out", "k_out", "v_out")
    return names if inputs.get("key_cache") is None else (*names, "key_cache_out", "value_cache_out")


def _with_caches(inputs: Inputs) -> tuple[Tensor, ...]:
    inputs = clone_inputs(inputs)
    results = SPEC.reference(**inputs)
    return results if inputs.get("key_cache") is None else (*results, *(inputs[name].contiguous() for name in CACHES))


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return _with_caches(upcast(inputs))


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """Each step rounded once, RoPE in float32: stricter than models, which round the cosines (R5)."""
    return _with_caches(inputs)


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return "x", "positions", "slot_mapping"


def batch_class(num_rows: int) -> int:
    """1; 2 to 16; above, torch's product sums in an order of its own for each size."""
    return num_rows if num_rows == 1 or num_rows > 16 else 2


def make(
    device: torch.device,
    model: Model,
    hidden_size: int,
    num_tokens: int,
    dtype: torch.dtype = BF16,
    *,
    norm: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    rope: bool = True,
    cache: bool = True,
    interleaved: bool = False,
    offset: float = 0.0,
    param_dtype: torch.dtype | None = None,
    position_dtype: torch.dtype = torch.int64,
) -> Inputs:
    """Slots in no order, and none twice; what the caches hold elsewhere is random."""
    heads, features = model.num_q_heads + 2 * model.num_kv_heads, model.head_dim
    of = param_dtype or dtype
    base = 1.0 - offset
    inputs: Inputs = {
        "x": normal(device, num_tokens, hidden_size, dtype=dtype, scale=3.0),
        "w_qkv": normal(device, heads * features, hidden_size, dtype=dtype, scale=hidden_size**-0.5, seed=1),
        "num_q_heads": model.num_q_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }
    if norm:
        inputs["norm_weight"] = normal(device, hidden_size, dtype=of, scale=0.1, base=base, seed=2)
    if bias:
        inputs["bias"] = normal(device, heads * features, dtype=of, seed=3)
    if qk_norm:
        inputs["q_norm_weight"] = normal(device, features, dtype=of, scale=0.1, base=base, seed=4)
        inputs["k_norm_weight"] = normal(device, features, dtype=FP32, scale=0.1, base=base, seed=5)
    if offset:
        inputs["norm_weight_offset"] = offset
    if rope:
        inputs["cos_sin_cache"] = table(device, model.rotary_dim)
        inputs["positions"] = positions(device, num_tokens, position_dtype)
        inputs["interleaved"] = interleaved
    if cache:
        pages = num_tokens // PAGE_SIZE + 2
        shape = (pages, PAGE_SIZE, model.num_kv_heads, model.head_dim)
        inputs["key_cache"] = normal(device, *shape, dtype=dtype, seed=6)
        inputs["value_cache"] = normal(device, *shape, dtype=dtype, seed=7)
        slots = torch.randperm(pages * PAGE_SIZE, generator=torch.Generator().manual_seed(8))[:num_tokens]
        inputs["slot_mapping"] = slots.to(device)
    return inputs


def _case(
    name: str,
    *args: Any,
    change: Callable[[Inputs], None] | None = None,
    many_programs: bool = False,
    **options: Any,
) -> Case:
    def build(device: torch.device) -> Inputs:
        inputs = make(device, *args, **options)
        if change is not None:
            change(inputs)
        return inputs

    return Case(name, build, many_programs)


def _cases() -> Iterator[Case]:
    small = Model(4, 2, 32, 32)
    for dtype in (BF16, FP16, FP32):
        for num_tokens in (1, 3, 17):
            yield _case(f"all-{NAMES[dtype]}-{num_tokens}", small, 64, num_tokens, dtype, bias=True, qk_norm=True)
        yield _case(f"R8-smollm2-{NAMES[dtype]}", SMOL, 576, 1, dtype, many_programs=dtype != BF16)
    yield _case("R8-smollm2-3", SMOL, 576, 3, bias=True, many_programs=True)
    yield _case("R8-smollm2-17", SMOL, 576, 17)
    yield _case("llama-heads", LLAMA, 64, 16, many_programs=True)
    yield _case("R1-int32", small, 64, 3, position_dtype=torch.int32)
    for name, model in MODELS.items():
        if name in ("R8-smollm2", "llama-3-8b", "20-heads"):
            continue
        # Every model in one way in the interpreter, and in all three elsewhere.
        way, form = len(name) % 3, {"interleaved": True}
        yield _case(f"{name}-2", model, 40, 2, bias=True, many_programs=way != 0)
        yield _case(f"{name}-1-interleaved", model, 40, 1, **form, many_programs=way != 1)
        yield _case(f"{name}-17-interleaved", model, 40, 17, bias=True, qk_norm=True, **form, many_programs=way != 2)
    for num_tokens in (1, 5, 18):
        yield _case(f"alone-{num_tokens}", small, 72, num_tokens, norm=False, rope=False, cache=False)
        yield _case(f"no-rope-{num_tokens}", small, 33, num_tokens, rope=False, bias=True)
        yield _case(
            f"no-cache-{num_tokens}",
            small,
            33,
            num_tokens,
            cache=False,
            qk_norm=num_tokens == 5,
            many_programs=num_tokens == 18,
        )
        yield _case(f"gemma-{num_tokens}", small, 32, num_tokens, offset=1.0, qk_norm=True, bias=True)
        yield _case(
            f"fp32-params-{num_tokens}",
            small,
            64,
            num_tokens,
            param_dtype=FP32,
            qk_norm=True,
            bias=True,
            many_programs=num_tokens == 18,
        )
        yield _case(
            f"bf16-params-{num_tokens}",
            small,
            64,
            num_tokens,
            FP32,
            param_dtype=BF16,
            bias=True,
            many_programs=num_tokens == 18,
        )
        yield _case(f"R2-positions-{num_tokens}", small, 64, num_tokens, change=_bad_positions)
        yield _case(f"R7-slots-{num_tokens}", small, 64, num_tokens, change=_bad_slots)
        yield _case(f"special-{num_tokens}", small, 64, num_tokens, change=_special)
        yield _case(f"N8-large-{num_tokens}", small, 64, num_tokens, FP16, change=_large)
        yield _case(
            f"layouts-{num_tokens}", small, 64, num_tokens, bias=True, change=_apart, many_programs=num_tokens == 18
        )
        yield _case(
            f"not-contiguous-{num_tokens}",
            small,
            64,
            num_tokens,
            bias=True,
            change=_not_contiguous,
            many_programs=num_tokens == 18,
        )
        yield _case(f"N7-offset-1-{num_tokens}", small, 64, num_tokens, bias=True, change=_misaligned)
    yield _case("R2-positions-qk-norm", small, 64, 5, qk_norm=True, change=_bad_positions)
    yield _case("no-tokens", small, 64, 0)
    yield _case("one-feature-hidden", small, 1, 3)
    yield Case("smollm2-4100", lambda d: make(d, SMOL, 576, 4100, bias=True, qk_norm=True), gpu_only=True)
    yield Case("llama-3-8b-4096", lambda d: make(d, LLAMA, 4096, 4096), gpu_only=True)
    yield Case("llama-3-8b-300", lambda d: make(d, LLAMA, 4096, 300), gpu_only=True)
    yield Case("llama-3-8b-16", lambda d: make(d, LLAMA, 4096, 16, bias=True), gpu_only=True)
    yield Case("llama-3-8b-1", lambda d: make(d, LLAMA, 4096, 1), gpu_only=True)


def _bad_positions(inputs: Inputs) -> None:
    last = inputs["cos_sin_cache"].shape[0]
    for token, bad in zip(
        range(0, inputs["positions"].shape[0], 2), (-1, last, 2**40, -(2**63), last + 1) * 2, strict=False
    ):
        inputs["positions"][token] = bad


def _bad_slots(inputs: Inputs) -> None:
    capacity = inputs["key_cache"].shape[0] * PAGE_SIZE
    for token, bad in zip(range(0, inputs["positions"].shape[0], 2), (-1, capacity, 2**40, -(2**63)) * 3, strict=False):
        inputs["slot_mapping"][token] = bad


def _special(inputs: Inputs) -> None:
    """A token of zeros, one with a NaN, one with an infinity."""
    x = inputs["x"]
    x[-1] = 0.0
    if x.shape[0] > 2:
        x[0, 3] = float("nan")
        x[1, 5] = float("inf")


def _large(inputs: Inputs) -> None:
    """Squares, and x times the norm's weight, that float16 cannot hold."""
    inputs["x"].mul_(3000)
    inputs["norm_weight"].mul_(20)


def _apart(inputs: Inputs) -> None:
    """Rows apart from each other, pages of K and V in turn, memory around all of it."""

    def spread(t: Tensor) -> Tensor:
        wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + 16))
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]

    for name in ("x", "w_qkv", "cos_sin_cache"):
        inputs[name] = spread(inputs[name])
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    inputs["key_cache"], inputs["value_cache"] = both.unbind(1)
    inputs["positions"] = torch.stack((inputs["positions"],) * 2, dim=1)[:, 1]
    inputs["slot_mapping"] = torch.stack((inputs["slot_mapping"],) * 3, dim=1)[:, 1]


def _not_contiguous(inputs: Inputs) -> None:
    for name in ("x", "w_qkv", "bias", "norm_weight", "cos_sin_cache"):
        inputs[name] = torch.stack((inputs[name], inputs[name]), dim=-1)[..., 1]


def _misaligned(inputs: Inputs) -> None:
    for name, t in inputs.items():
        if isinstance(t, Tensor):
            inputs[name] = torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    yield make(device, SMOL, 576, 33, bias=True, cache=False)
    yield make(device, Model(4, 2, 64, 32), 200, 18, FP32, cache=False, qk_norm=True)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    names = ("x", "w_qkv", "bias", "norm_weight", "q_norm_weight", "k_norm_weight", "cos_sin_cache", *CACHES)
    names += ("positions", "slot_mapping")
    model = Model(3, 1, 16, 8)
    numbers = (3, 1, 16, 1e-6, 0.0, 1e-6, False)
    inputs = make(device, model, 24, 3, bias=True, qk_norm=True)
    alone = make(device, model, 24, 18, FP32, norm=False, rope=False, cache=False)
    out = tuple(torch.empty(3, heads, 16, dtype=BF16, device=device) for heads in (3, 1, 1))
    yield "qkv_proj", ops.qkv_proj.default, (*(inputs[name] for name in names), *numbers)
    yield "qkv_proj-alone", ops.qkv_proj.default, (*(alone.get(name) for name in names), *numbers)
    yield "qkv_proj_out", ops.qkv_proj_out.default, (*(inputs[name] for name in names), *numbers, *out)


def desc(num_tokens: int, hidden_size: int, model: Model, dtype: torch.dtype = BF16, **more: Any) -> Desc:
    """An aligned call with norm, RoPE and cache on a GPU, with some of it changed."""
    made = Desc(
        torch.device("cuda", 0),
        dtype,
        None,
        dtype,
        None,
        None,
        torch.int64,
        num_tokens,
        hidden_size,
        *model,
        False,
        False,
        True,
        True,
        True,
        (),
    )
    return made._replace(**more)


def _compiled(kind: str, *args: Any, in_place: bool = False, **more: Any) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.qkv_proj import kernel_triton

        made = desc(*args, **more)
        if kind == "few":
            return kernel_triton.specialize_few(made, features)
        if kind == "norm":
            return kernel_triton.specialize_norm(made, features)
        return kernel_triton.specialize_after(made, features, in_place=in_place)

    return specialize


_QK_NORM = {"q_norm_dtype": BF16, "k_norm_dtype": BF16}
# Few tokens: what is stored is a few elements a program. Many tokens: 16 bytes an access.
COMPILED = {
    "few-1": Compiled(_compiled("few", 1, 4096, LLAMA), wide=False),
    "few-16": Compiled(_compiled("few", 16, 4096, LLAMA), wide=False),
    "norm": Compiled(_compiled("norm", 4096, 4096, LLAMA), archs=(90, "gfx942")),
    "after": Compiled(_compiled("after", 4096, 4096, LLAMA, in_place=True, **_QK_NORM)),
    "few-1-fp32": Compiled(_compiled("few", 1, 4096, LLAMA, FP32), archs=(90,), wide=False),
    "few-16-fp32": Compiled(_compiled("few", 16, 4096, LLAMA, FP32), archs=(90,), wide=False),
    "few-16-fp16": Compiled(_compiled("few", 16, 576, SMOL, FP16), archs=(90,), wide=False),
    "few-1-unaligned": Compiled(_compiled("few", 1, 577, SMOL, aligned=False), archs=(90,), wide=False),
    "few-1-interleaved": Compiled(_compiled("few", 1, 4096, LLAMA, interleaved=True), archs=(90,), wide=False),
    "norm-16384-fp32": Compiled(_compiled("norm", 4096, 16384, LLAMA, FP32), archs=(90,)),
    "after-few": Compiled(_compiled("after", 64, 4096, LLAMA), archs=(90,), wide=False),
    "after-interleaved": Compiled(_compiled("after", 4096, 4096, LLAMA, interleaved=True), archs=(90,)),
    "after-rotary-64": Compiled(_compiled("after", 4096, 4096, Model(32, 8, 128, 64)), archs=(90,)),
}
