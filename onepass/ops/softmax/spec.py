"""What benchmarks and tests need to know of softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.softmax.op import softmax
from onepass.ops.softmax.reference import softmax as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

SMOLLM2_VOCAB_SIZE, LLAMA_3_VOCAB_SIZE = 49152, 128256


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Logits as spread as a language model's."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
    return {"logits": (3.0 * logits).to(dtype), "temperature": None}


def unfused(logits: Tensor, *, temperature: float | Tensor | None = None) -> Tensor:
    """The same in torch's own kernels: divide, softmax."""
    if temperature is None:
        return torch.softmax(logits, -1)
    divisor = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return torch.softmax(logits / divisor, -1).to(logits.dtype)


SPEC = OpSpec(
    op="softmax",
    shapes=(
        *((t, LLAMA_3_VOCAB_SIZE) for t in (1, 64, 256)),
        (64, SMOLLM2_VOCAB_SIZE),
        # Attention scores of a prefill: many rows that fit in registers.
        (8192, 4096),
    ),
    make_inputs=make_inputs,
    fused=softmax,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {"out": torch.empty_like(inputs["logits"])},
    bytes_moved=lambda inputs: 2 * tensor_bytes(inputs["logits"]),
    unfused_bytes=lambda inputs: (2 if inputs["temperature"] is None else 4) * tensor_bytes(inputs["logits"]),
    unfused_launches=1,
    # maximum 1, subtract and scale 2, exp 1, sum 1, divide 1.
    flops=lambda inputs: 6 * inputs["logits"].numel(),
)
