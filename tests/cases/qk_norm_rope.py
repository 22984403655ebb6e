"""Inputs of qk_norm_rope that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case
from cases.compile_facts import Compiled
from cases.rope_inputs import BAD, LLAMA, MODELS, NAMES, SMOL, Model, heads, positions, special, table, weight
from onepass.ops.qk_norm_rope.spec import SPEC
from onepass.ops.rope_call import Desc
from onepass.ops.rope_reference import rms_norm, rotate
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

VIEWS = ("v_out",)


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return "q_out", "k_out", "v_out"


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """v is moved, if at all: it must be exact."""
    q, k, _ = SPEC.reference(**upcast(inputs))
    return q, k, None


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """Norm and rotation one after the other, each in float32 and rounded: stricter than models."""
    qkv, eps, offset = inputs["qkv"], inputs.get("eps", 1e-6), inputs.get("weight_offset", 0.0)
    sizes = (inputs["num_q_heads"], inputs["num_kv_heads"], inputs["num_kv_heads"])
    q, k, v = qkv.unflatten(1, (sum(sizes), inputs["head_dim"])).split(sizes, dim=1)
    results = []
    for x, name in ((q, "q_weight"), (k, "k_weight")):
        normed = rms_norm(x, inputs[name], eps, offset).to(x.dtype)
        turned = rotate(normed, inputs["cos_sin_cache"], inputs["positions"], inputs.get("interleaved", False))
        results.append(turned.to(x.dtype))
    return *results, v


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    """Outputs in place are parts of qkv: tests/cpu/test_qk_norm_rope.py."""
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return "qkv", "positions"


def plain(
    model: Model,
    dtype: torch.dtype = BF16,
    num_tokens: int = 3,
    interleaved: bool = False,
    weight_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    **more: Any,
) -> Callable[[torch.device], Inputs]:
    num_q_heads, num_kv_heads, head_dim, rotary_dim = model
    q_weight, k_weight = weight_dtypes or (dtype, dtype)

    def build(device: torch.device) -> Inputs:
        return {
            "qkv": heads(device, num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            "q_weight": weight(device, head_dim, q_weight),
            "k_weight": weight(device, head_dim, k_weight, seed=102),
            "cos_sin_cache": table(device, rotary_dim),
            "positions": positions(device, num_tokens),
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "interleaved": interleaved,
            **more,
        }

    return build


def _changed(build: Callable[[torch.device], Inputs], **changes: Callable[[torch.device], Any]) -> Any:
    return lambda device: {**build(device), **{name: make(device) for name, make in changes.items()}}


def _cases() -> Iterator[Case]:
    for name, model in MODELS.items():
        yield Case(name, plain(model))
    for name in ("R8-smollm2", "R3-128-64", "R3-80-32", "256-64", "72", "7-4"):
        yield Case(f"R6-{name}-interleaved", plain(MODELS[name], interleaved=True))
        yield Case(f"{name}-fp32", plain(MODELS[name], FP32))
    yield Case("R8-smollm2-fp16", plain(SMOL, FP16))
    yield Case("R3-80-32-fp16-interleaved", plain(MODELS["R3-80-32"], FP16, interleaved=True))
    yield Case("R1-int32", _changed(plain(SMOL), positions=lambda d: positions(d, 3, torch.int32)))
    for name, (values, dtype) in BAD.items():
        wrong = _changed(
            plain(MODELS["R3-128-64"], num_tokens=len(values)),
            positions=lambda d, v=values, t=dtype: torch.tensor(v, dtype=t, device=d),
        )
        yield Case(name, wrong)

    width = 15 * 64
    for name, make in {
        "N4-slice": lambda d: heads(d, 3, width + 48)[:, 16 : width + 16],
        "N4-transposed": lambda d: heads(d, width, 3).t(),
        "N4-every-other-column": lambda d: heads(d, 3, 2 * width)[:, ::2],
        "N4-expanded": lambda d: heads(d, 1, width).expand(3, width),
        "N7-offset-1": lambda d: heads(d, 3 * width + 1)[1:].view(3, width),
        "N7-odd-stride": lambda d: heads(d, 3, width + 1)[:, 1:],
    }.items():
        yield Case(name, _changed(plain(SMOL), qkv=make))
    yield Case("N4-weights-strided", _changed(plain(SMOL), k_weight=lambda d: weight(d, 128)[::2]))
    yield Case("N5-no-tokens", plain(SMOL, num_tokens=0))
    yield Case("N5-no-kv-heads", plain(Model(3, 0, 64, 64)))
    yield Case("N5-no-q-heads", plain(Model(0, 3, 64, 64)))
    for dtypes in ((FP32, FP32), (BF16, FP32), (FP32, BF16)):  # N10
        yield Case(f"N10-{NAMES[dtypes[0]]}-{NAMES[dtypes[1]]}", plain(SMOL, weight_dtypes=dtypes))
    yield Case("N11-gemma", plain(MODELS["256"], weight_offset=1.0))
    yield Case("special", _special)
    yield Case("many-tokens", plain(LLAMA, num_tokens=700), many_programs=True)
    yield Case("many-tokens-smollm2", plain(SMOL, num_tokens=701, interleaved=True), many_programs=True)


def _special(device: torch.device) -> Inputs:
    """NaN and infinities in heads of q, k and v."""
    inputs = plain(MODELS["R3-128-64"], num_tokens=8)(device)
    for part in inputs["qkv"].view(8, 8, 128).split((4, 2, 2), dim=1):
        special(part)
    return inputs


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    for name in ("R8-smollm2", "R3-128-64", "R3-80"):
        yield plain(MODELS[name], num_tokens=600)(device)
    yield plain(MODELS["R3-80-32"], FP32, num_tokens=600, interleaved=True)(device)
    yield {**plain(MODELS["R3-80"], num_tokens=600)(device), "qkv": heads(device, 600, 8 * 80 + 1)[:, 1:]}


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    inputs = plain(Model(3, 2, 16, 8))(device)
    names = ("qkv", "q_weight", "k_weight", "cos_sin_cache", "positions", "num_q_heads", "num_kv_heads", "head_dim")
    args = tuple(inputs[name] for name in names)
    q, k, v = (torch.empty(3, n, 16, dtype=BF16, device=device) for n in (3, 2, 2))
    yield "qk_norm_rope", ops.qk_norm_rope.default, (*args, 1e-6, 0.0, False, False)
    strided = (heads(device, 3, 224)[:, ::2], *args[1:])
    yield "qk_norm_rope-strided", ops.qk_norm_rope.default, (*strided, 1e-5, 1.0, True, True)
    yield "qk_norm_rope_out", ops.qk_norm_rope_out.default, (*args, 1e-6, 0.0, False, False, q, k, v)
    yield "qk_norm_rope_out-no-v", ops.qk_norm_rope_out.default, (*args, 1e-6, 0.0, False, False, q, k, None)


def _compiled(
    model: Model = LLAMA,
    dtype: torch.dtype = BF16,
    num_tokens: int = 8192,
    copies_v: bool = False,
    k_weight: torch.dtype | None = None,
    aligned: bool = True,
) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops import rope_triton

        num_q_heads, num_kv_heads, head_dim, rotary_dim = model
        sizes = (num_tokens, num_q_heads, num_kv_heads, num_kv_heads if copies_v else 0, head_dim, rotary_dim)
        device = torch.device("cuda", 0)
        desc = Desc(device, dtype, dtype, k_weight or dtype, torch.int64, *sizes, False, aligned, ())
        return rope_triton.specialize(desc, rope_triton.heuristic(desc), features)

    return specialize


COMPILED = {
    "bf16": Compiled(_compiled()),
    "bf16-one-token": Compiled(_compiled(num_tokens=1), archs=(90,)),
    "bf16-smollm2": Compiled(_compiled(SMOL), archs=(90,)),
    "bf16-v": Compiled(_compiled(copies_v=True), archs=(90,)),
    "bf16-96": Compiled(_compiled(MODELS["R3-96"]), archs=(90,)),
    "bf16-80-32": Compiled(_compiled(MODELS["R3-80-32"]), archs=(90,)),
    "bf16-256": Compiled(_compiled(MODELS["256"]), archs=(90,)),
    "bf16-k-fp32": Compiled(_compiled(k_weight=FP32), archs=(90,)),
    "bf16-unaligned": Compiled(_compiled(aligned=False), archs=(90,), wide=False),
    "fp32": Compiled(_compiled(dtype=FP32), archs=(80, 90)),
}
