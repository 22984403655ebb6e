"""What benchmarks and tests need to know of softmax_weighted_sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.softmax_weighted_sum.op import softmax_weighted_sum
from onepass.ops.softmax_weighted_sum.reference import softmax_weighted_sum as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """`shape` is that of the values, [T, N, D]: each row pools N values of its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)

    return {"logits": normal(*shape[:-1]), "values": normal(*shape)}


def unfused(logits: Tensor, values: Tensor) -> Tensor:
    """The same in torch's own kernels: softmax, then a product."""
    weights = torch.softmax(logits, -1).to(values.dtype)
    return torch.matmul(weights.unsqueeze(-2), values).squeeze(-2)


def _result_bytes(inputs: dict[str, Any]) -> int:
    logits, values = inputs["logits"], inputs["values"]
    return int(logits.numel() // logits.shape[-1] * values.shape[-1] * values.element_size())


def _bytes_moved(inputs: dict[str, Any]) -> int:
    return tensor_bytes(inputs["logits"], inputs["values"]) + _result_bytes(inputs)


SPEC = OpSpec(
    op="softmax_weighted_sum",
    shapes=(
        # Pooling over a sequence's hidden states: SmolLM2-135M's and Llama-3-8B's.
        (1, 512, 4096),
        (64, 512, 576),
        (64, 512, 4096),
        # Eight experts' results a token.
        (8192, 8, 4096),
    ),
    make_inputs=make_inputs,
    fused=softmax_weighted_sum,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["values"][..., 0, :])},
    bytes_moved=_bytes_moved,
    unfused_bytes=lambda inputs: _bytes_moved(inputs) + 2 * tensor_bytes(inputs["logits"]),
    unfused_launches=2,
    flops=lambda inputs: 6 * inputs["logits"].numel() + 2 * inputs["values"].numel(),
    row_inputs=("logits", "values"),
    ceiling="read",
)
