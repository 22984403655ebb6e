"""What benchmarks and tests need to know of sample: top-p 0.9 over a whole vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.sample.op import sample
from onepass.ops.sample.reference import sample as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

VOCAB_LLAMA_3 = 128256
VOCAB_SMOLLM2 = 49152


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Normal logits, the hard case for top-p: its limit lies among many tokens of about the same weight."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)
    seeds = torch.randint(2**62, shape[:-1], dtype=torch.int64, device=device, generator=generator)
    return {"logits": logits, "top_p": 0.9, "seed": seeds}


def unfused(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: Any = None,
    offset: Any = None,
) -> Tensor:
    """As Hugging Face Transformers does it: each limit masks the logits, then softmax and multinomial.

    It draws from torch's own generator.
    """
    scores = logits.float()
    scores = scores / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    if top_k:
        scores = scores.masked_fill(scores < torch.topk(scores, top_k)[0][..., -1:], -torch.inf)
    if top_p is not None:
        ascending, indices = torch.sort(scores, descending=False)
        remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        remove[..., -1:] = False
        scores = scores.masked_fill(remove.scatter(-1, indices, remove), -torch.inf)
    probabilities = scores.softmax(dim=-1)
    if min_p is not None:
        largest = probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < min_p * largest, 0.0)
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, num_samples=1).view(logits.shape[:-1])


def fault(inputs: Inputs, ids: Tensor) -> str:
    """Whether a token was drawn that does not belong to its row's nucleus, to 10^-5 of the whole weight."""
    probabilities = inputs["logits"].double().softmax(-1)
    drawn = probabilities.gather(-1, ids.long()[..., None])
    before = torch.where(probabilities > drawn, probabilities, 0.0).sum(-1)
    wrong = int((before >= inputs["top_p"] + 1e-5).sum())
    return f"{wrong} of {ids.numel()} tokens are not among the {inputs['top_p']:g} most likely" if wrong else ""


def _logits_bytes(inputs: dict[str, Any]) -> int:
    return tensor_bytes(inputs["logits"])


def _unfused_bytes(inputs: dict[str, Any]) -> int:
    """Of top-p: division 8 bytes a logit, sort 16 in one pass (a radix sort takes four), softmax, cumulative sum,
    comparison 8 + 8 + 5, scatter 10, fill 9, softmax 8, multinomial 4."""
    return inputs["logits"].numel() * 76


SPEC = OpSpec(
    op="sample",
    shapes=((1, VOCAB_LLAMA_3), (64, VOCAB_LLAMA_3), (1, VOCAB_SMOLLM2), (64, VOCAB_SMOLLM2)),
    make_inputs=make_inputs,
    fused=sample,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {},
    bytes_moved=lambda inputs: _logits_bytes(inputs) + tensor_bytes(inputs["seed"]) + 9 * inputs["seed"].numel(),
    unfused_bytes=_unfused_bytes,
    unfused_launches=12,
    # The difference to the largest, its scaling, a polynomial of degree 6, and a sum, a logit.
    flops=lambda inputs: 16 * inputs["logits"].numel(),
    row_inputs=("logits", "seed"),
    ceiling="read",
    fault=fault,
)
