"""What benchmarks and tests need to know of add_relu."""

from __future__ import annotations

from typing import Any

import torch

from onepass.ops.add_relu.op import add_relu
from onepass.ops.add_relu.reference import add_relu as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    x, y = (torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype) for _ in range(2))
    return {"x": x, "y": y}


def unfused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + y)


def _element_bytes(inputs: dict[str, Any]) -> int:
    return tensor_bytes(inputs["x"])


SPEC = OpSpec(
    op="add_relu",
    shapes=((1, 4096), (512, 4096), (4096, 4096), (65536, 4096)),
    make_inputs=make_inputs,
    fused=add_relu,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["x"])},
    bytes_moved=lambda inputs: 3 * _element_bytes(inputs),
    unfused_bytes=lambda inputs: 5 * _element_bytes(inputs),
    unfused_launches=2,
    flops=lambda inputs: 2 * inputs["x"].numel(),
)
