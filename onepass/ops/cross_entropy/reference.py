"""Cross entropy of logits with class indices, in plain torch ops: the meaning of the op, in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.cross_entropy.op import Desc, Numbers


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss in float32, or in float64 when the logits are; with `return_lse` also the logsumexp of each row."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    vocab_size = x.shape[-1]
    target = target.long()
    counts = target != ignore_index
    valid = (target >= 0) & (target < vocab_size)
    if vocab_size == 0:
        losses, lse = x.new_zeros(target.shape), x.new_full(target.shape, -torch.inf)
    else:
        log_p = torch.log_softmax(x, -1)
        losses = -log_p.gather(-1, target.where(valid, 0).unsqueeze(-1)).squeeze(-1)
        if label_smoothing:
            losses = losses * (1.0 - label_smoothing) - log_p.mean(-1) * label_smoothing
        lse = torch.logsumexp(x, -1)
    losses = losses.where(valid, torch.nan).where(counts, 0.0)
    if reduction != "none":
        losses = losses.sum() / counts.sum() if reduction == "mean" else losses.sum()
    return (losses, lse) if return_lse else losses


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(
        numbers: Numbers, logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor | None, workspace: Tensor
    ) -> None:
        found_loss, found_lse = cross_entropy(
            logits,
            target,
            ignore_index=numbers.ignore_index,
            label_smoothing=numbers.label_smoothing,
            softcap=numbers.softcap,
            reduction=desc.reduction,
            return_lse=True,
        )
        loss.copy_(found_loss)
        if lse is not None:
            lse.copy_(found_lse)

    return run
