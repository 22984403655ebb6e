"""What benchmarks and tests need to know of cross_entropy."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onepass.ops.cross_entropy.op import cross_entropy
from onepass.ops.cross_entropy.reference import cross_entropy as reference
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

LLAMA_3_8B, SMOLLM2_135M = 128256, 49152
"""Sizes of the vocabulary."""


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random logits, and a target for each row."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).mul_(2.0).to(dtype)
    target = torch.randint(0, max(1, shape[-1]), shape[:-1], device=device, generator=generator)
    return {"logits": logits, "target": target, "reduction": "none"}


def unfused(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Torch's own, of logits in float32, as models call it."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.float()
    loss = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        target.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    loss = loss.view(target.shape) if reduction == "none" else loss
    return (loss, torch.logsumexp(wide, -1)) if return_lse else loss


def _bytes_moved(inputs: Inputs) -> int:
    rows = inputs["target"].numel()
    return tensor_bytes(inputs["logits"], inputs["target"]) + 4 * (rows if inputs["reduction"] == "none" else 1)


def _unfused_bytes(inputs: Inputs) -> int:
    """To float32 (where they are not), log_softmax, and the target's loss picked from its result."""
    logits = inputs["logits"]
    wide = 4 * logits.numel()
    widening = 0 if logits.dtype == torch.float32 else tensor_bytes(logits) + wide
    return widening + 2 * wide + tensor_bytes(inputs["target"]) + 8 * inputs["target"].numel()


SPEC = OpSpec(
    op="cross_entropy",
    shapes=(
        *((num_tokens, LLAMA_3_8B) for num_tokens in (1, 64, 1024, 8192)),
        (64, SMOLLM2_135M),
    ),
    make_inputs=make_inputs,
    fused=cross_entropy,
    unfused=unfused,
    reference=reference,
    allocate_out=lambda inputs: {},
    bytes_moved=_bytes_moved,
    unfused_bytes=_unfused_bytes,
    unfused_launches=3,
    # the maximum 1, the difference 1, exp 2, the sum 1.
    flops=lambda inputs: 5 * inputs["logits"].numel(),
    row_inputs=("logits", "target"),
    ceiling="read",
)
