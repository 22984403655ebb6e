"""What benchmarks and tests need to know of logsumexp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.logsumexp.op import logsumexp
from onepass.ops.logsumexp.reference import logsumexp as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

SMOLLM2_VOCAB_SIZE, LLAMA_3_VOCAB_SIZE = 49152, 128256


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Logits as spread as a language model's."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
    return {"x": (3.0 * x).to(dtype)}


def unfused(x: Tensor) -> Tensor:
    """torch's own, in float32."""
    return torch.logsumexp(x.float(), -1)


def _result_bytes(inputs: dict[str, Any]) -> int:
    return 4 * int(inputs["x"].numel() // inputs["x"].shape[-1])


SPEC = OpSpec(
    op="logsumexp",
    shapes=((1, LLAMA_3_VOCAB_SIZE), (64, LLAMA_3_VOCAB_SIZE), (64, SMOLLM2_VOCAB_SIZE), (8192, SMOLLM2_VOCAB_SIZE)),
    make_inputs=make_inputs,
    fused=logsumexp,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty(inputs["x"].shape[:-1], device=inputs["x"].device)},
    bytes_moved=lambda inputs: tensor_bytes(inputs["x"]) + _result_bytes(inputs),
    # torch's: the maximum, exp(x - maximum) written to memory, its sum.
    unfused_bytes=lambda inputs: tensor_bytes(inputs["x"]) + 3 * 4 * inputs["x"].numel() + _result_bytes(inputs),
    unfused_launches=6,
    # maximum 1, subtract and scale 2, exp 1, sum 1.
    flops=lambda inputs: 5 * inputs["x"].numel(),
    row_inputs=("x",),
    ceiling="read",
)
