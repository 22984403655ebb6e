"""Inputs of merge_attention_states that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.merge_attention_states.op import Desc
from onepass.ops.merge_attention_states.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
INF = float("inf")


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("out", "lse")


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return SPEC.reference(**upcast(inputs))  # type: ignore[no-any-return]


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """The reference in the inputs' dtype: torch's own steps give NaN for empty states."""
    out, lse = SPEC.reference(**inputs)
    return out.contiguous(), lse.contiguous()


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ({"out": "out_a", "lse": "lse_a"}, {"out": "out_b", "lse": "lse_b"})


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return SPEC.row_inputs


def plain(
    batch: int, q_len: int, heads: int, dim: int, dtype: torch.dtype, spread: float = 1.0
) -> Callable[[torch.device], Inputs]:
    return lambda device: {
        "out_a": normal(device, batch, q_len, heads, dim, dtype=dtype),
        "lse_a": normal(device, batch, heads, q_len, base=5.0, scale=spread, seed=1),
        "out_b": normal(device, batch, q_len, heads, dim, dtype=dtype, seed=2),
        "lse_b": normal(device, batch, heads, q_len, base=5.0, scale=spread, seed=3),
    }


def _changed(change: Callable[[Inputs], Inputs], base: Callable[[torch.device], Inputs]) -> Callable[..., Inputs]:
    def build(device: torch.device) -> Inputs:
        inputs = base(device)
        return {**inputs, **change(inputs)}

    return build


def _empty_states(inputs: Inputs) -> Inputs:
    """Row 0: both empty, 1: the first, 2: the second; what an empty state holds is not looked at."""
    changed = {name: t.clone() for name, t in inputs.items()}
    for name, rows in (("a", (0, 1)), ("b", (0, 2))):
        for row in rows:
            changed[f"out_{name}"][row] = float("nan")
            changed[f"lse_{name}"][row] = -INF
    return changed


def _special(inputs: Inputs) -> Inputs:
    """NaN where there is NaN; weights of 0 where the logarithms are far apart."""
    changed = {name: t.clone() for name, t in inputs.items()}
    changed["lse_a"][0] = float("nan")
    changed["lse_b"][1] = 2000.0
    changed["lse_a"][2] = -3e38
    changed["out_b"][3] = float("nan")
    changed["out_a"][4] = INF
    return changed


def _expanded(inputs: Inputs) -> Inputs:
    return {
        "out_b": inputs["out_b"][:1].expand_as(inputs["out_b"]),
        "lse_b": inputs["lse_b"][:, :, :1].expand_as(inputs["lse_b"]),
    }


def _transposed_heads(inputs: Inputs) -> Inputs:
    return {
        "out_a": inputs["out_a"].transpose(1, 2).contiguous().transpose(1, 2),
        "lse_a": inputs["lse_a"].transpose(1, 2).contiguous().transpose(1, 2),
    }


def _uneven(inputs: Inputs) -> Inputs:
    return {"out_a": inputs["out_a"].transpose(-1, -2).contiguous().transpose(-1, -2)}


def _shifted(inputs: Inputs) -> Inputs:
    t = inputs["out_b"]
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return {"out_b": memory[1:].view(t.shape).copy_(t)}


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain(3, 2, 32, 128, dtype))
        yield Case(f"A5-empty-states-{NAMES[dtype]}", _changed(_empty_states, plain(5, 1, 4, 64, dtype)))
        yield Case(f"special-{NAMES[dtype]}", _changed(_special, plain(6, 1, 4, 64, dtype)))
    yield Case("far-apart", plain(3, 2, 9, 64, BF16, spread=100.0))
    for dim in (1, 17, 80, 96, 256, 1000):
        yield Case(f"A8-head-dim-{dim}", plain(2, 3, 3, dim, BF16))
    yield Case("A1-28-heads", plain(2, 5, 28, 128, BF16))
    yield Case("A9-transposed-heads", _changed(_transposed_heads, plain(2, 3, 4, 64, BF16)))
    yield Case("A9-expanded", _changed(_expanded, plain(2, 3, 4, 64, BF16)))
    yield Case("A9-transposed-values", _changed(_uneven, plain(2, 3, 4, 64, BF16)))
    yield Case("N7-offset-1", _changed(_shifted, plain(2, 3, 4, 64, BF16)))
    yield Case("N5-no-sequences", plain(0, 1, 4, 64, BF16))
    yield Case("N5-no-queries", plain(2, 0, 4, 64, BF16))
    yield Case("A6-65536-sequences", plain(65536, 1, 2, 8, BF16), many_programs=True)


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    yield plain(257, 1, 9, 64, BF16)(device)
    yield plain(33, 2, 5, 80, FP32)(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    inputs = tuple(plain(2, 3, 4, 24, BF16)(device).values())
    yield "merge_attention_states", ops.merge_attention_states.default, inputs
    results = (torch.empty_like(inputs[0]), torch.empty_like(inputs[1]))
    yield "merge_attention_states_out", ops.merge_attention_states_out.default, (*inputs, *results)


def _compiled(dim: int, dtype: torch.dtype, batch: int = 64, aligned: bool = True) -> Callable[[Any], Any]:
    def specialize(features: Any) -> Any:
        from onepass.ops.merge_attention_states import kernel_triton

        desc = Desc(torch.device("cuda", 0), dtype, batch, 1, 32, dim, aligned, ())
        return kernel_triton.specialize(desc, features)

    return specialize


COMPILED = {
    **{NAMES[dtype]: Compiled(_compiled(128, dtype)) for dtype in (BF16, FP32)},
    "bf16-many": Compiled(_compiled(128, BF16, batch=1 << 20), (90,)),
    "fp16-80": Compiled(_compiled(80, FP16), (90,)),
    "bf16-unaligned": Compiled(_compiled(128, BF16, aligned=False), (90,), wide=False),
}
