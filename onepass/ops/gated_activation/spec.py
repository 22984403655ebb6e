"""What benchmarks and tests need to know of gated_activation."""

from __future__ import annotations

from typing import Any

import torch

from onepass.ops.activations import ACTIVATION_FUNCTIONS
from onepass.ops.gated_activation.op import gated_activation
from onepass.ops.gated_activation.reference import gated_activation as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

LLAMA_3_8B, SMOLLM2_135M = 14336, 1536
"""Intermediate sizes."""


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """A packed x."""
    return {"x": _normal(shape, dtype, device, torch.Generator(device).manual_seed(seed))}


def make_separate_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Gate and up."""
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _normal(shape, dtype, device, generator) for name in ("gate", "up")}


def _normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def unfused(x: torch.Tensor, up: torch.Tensor | None = None, *, activation: str = "silu") -> torch.Tensor:
    """The activation, then the product, each a kernel of torch."""
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    return ACTIVATION_FUNCTIONS[activation](gate) * up


def _allocate_out(inputs: Inputs) -> Inputs:
    if inputs.get("up") is not None:
        return {"out": torch.empty_like(inputs["up"])}
    x = inputs["x"]
    return {"out": x.new_empty((*x.shape[:-1], x.shape[-1] // 2))}


def _bytes_moved(inputs: dict[str, Any]) -> int:
    x, up = inputs["x"], inputs.get("up")
    return 3 * tensor_bytes(x) if up is not None else tensor_bytes(x) * 3 // 2


SPEC = OpSpec(
    op="gated_activation",
    shapes=(
        *((num_tokens, 2 * LLAMA_3_8B) for num_tokens in (1, 64, 8192)),
        *((num_tokens, 2 * SMOLLM2_135M) for num_tokens in (1, 64)),
    ),
    make_inputs=make_inputs,
    fused=gated_activation,
    unfused=unfused,
    reference=reference,
    allocate_out=_allocate_out,
    bytes_moved=_bytes_moved,
    # silu(gate) is written and read once more.
    unfused_bytes=lambda inputs: _bytes_moved(inputs) * 5 // 3,
    unfused_launches=2,
    # SiLU 4 (exp, add, divide, multiply), the product 1.
    flops=lambda inputs: 5 * _bytes_moved(inputs) // (3 * inputs["x"].element_size()),
    form_inputs={"swiglu": make_separate_inputs, "geglu": make_separate_inputs},
)
