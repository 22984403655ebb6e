"""What benchmarks and tests need to know of rms_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from onepass.ops.activations import ACTIVATION_FUNCTIONS
from onepass.ops.rms_norm.op import rms_norm
from onepass.ops.rms_norm.reference import rms_norm as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random x and residual, and a weight around 1: the norm between two halves of a Llama layer."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    return {
        "x": normal(*shape).to(dtype),
        "weight": (1 + 0.1 * normal(shape[-1])).to(dtype),
        "eps": 1e-6,
        "residual": normal(*shape).to(dtype),
    }


def unfused(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: str = "llama",
) -> Any:
    """The same in torch's own kernels: add, rms_norm, activation. Their norm has Gemma's casting."""
    total = x if residual is None else x + residual
    if weight is not None and weight_offset != 0:
        weight = weight_offset + weight
    y = F.rms_norm(total, x.shape[-1:], weight, eps)
    if activation is not None:
        y = ACTIVATION_FUNCTIONS[activation](y)
    return y if residual is None else (y, total)


def _allocate_out(inputs: Inputs) -> Inputs:
    names = ("out",) if inputs.get("residual") is None else ("out", "residual_out")
    return {name: torch.empty_like(inputs["x"]) for name in names}


def _bytes_moved(inputs: dict[str, Any]) -> int:
    """x and residual in, y and the sum out, the weight once."""
    tensors = 2 if inputs.get("residual") is None else 4
    return tensors * tensor_bytes(inputs["x"]) + tensor_bytes(inputs["weight"])


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """The add writes its sum, and the norm reads it."""
    return _bytes_moved(inputs) + (0 if inputs.get("residual") is None else tensor_bytes(inputs["x"]))


SPEC = OpSpec(
    op="rms_norm",
    # Llama-3-8B, and SmolLM2-135M.
    shapes=((1, 4096), (64, 4096), (8192, 4096), (1, 576), (64, 576)),
    make_inputs=make_inputs,
    fused=rms_norm,
    unfused=unfused,
    reference=reference,
    allocate_out=_allocate_out,
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    unfused_launches=2,
    # add 1, square and sum 2, scale 1, weight 1.
    flops=lambda inputs: 5 * inputs["x"].numel(),
)
