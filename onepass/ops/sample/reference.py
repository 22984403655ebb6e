"""Sampling in plain torch ops, in float64: sort, cumulative sum, inverse distribution function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onepass.ops.sample.op import Desc, Parameters

Number = float | Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: Tensor, row: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of the key `seed` and the counter (row, offset), low words first; all int64 [num_rows].

    Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = row & _WORD, (row >> 32) & _WORD, offset & _WORD, (offset >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a · b, of 32-bit numbers in int64: no step reaches bit 63 but the last."""
    upper = ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16
    return upper, (a * b) & _WORD


def sample(
    logits: Tensor,
    *,
    temperature: Number = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    seed: int | Tensor = 0,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `op.sample` says, with a seed."""
    vocab_size = logits.shape[-1]
    num_rows = logits.numel() // vocab_size if vocab_size else logits[..., :0].sum(-1).numel()
    x = logits.reshape(num_rows, vocab_size)
    counter = torch.arange(num_rows, device=logits.device)
    if isinstance(seed, Tensor) and seed.numel() != 1:
        counter = torch.zeros_like(counter)

    def per_row(value: Number | None, default: float, dtype: torch.dtype) -> Tensor:
        t = torch.as_tensor(default if value is None else value, dtype=dtype, device=logits.device)
        return t.reshape(-1).expand(num_rows)

    ids, valid = sample_rows(
        x.double(),
        # The kernels read these numbers in float32.
        per_row(temperature, 1.0, torch.float32).double(),
        per_row(top_k, 0, torch.int64),
        per_row(top_p, 1.0, torch.float32).double(),
        per_row(min_p, 0.0, torch.float32).double(),
        philox(per_row(seed, 0, torch.int64), counter, per_row(offset, 0, torch.int64)),
    )
    ids, valid = ids.view(logits.shape[:-1]), valid.view(logits.shape[:-1])
    return (ids, valid) if return_valid else ids


def sample_rows(
    x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, words: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """x: [num_rows, vocab_size], float64; the others [num_rows]. Returns ids, int64, and valid, bool: [num_rows]."""
    num_rows, vocab_size = x.shape
    if x.numel() == 0:
        return x.new_zeros(num_rows, dtype=torch.int64), x.new_zeros(num_rows, dtype=torch.bool)
    x = torch.where(x.isnan(), -torch.inf, x)
    largest = x.amax(-1, keepdim=True)
    valid = (largest[:, 0] > -torch.inf) & (temperature >= 0) & temperature.isfinite()
    greedy = temperature == 0
    t = torch.where(valid & ~greedy, temperature, 1.0)[:, None]
    weight = torch.where(x == largest, 1.0, torch.exp((x - largest) / t))
    weight = torch.where(weight.isnan(), 0.0, weight)

    rank_to_id = torch.sort(x, dim=-1, descending=True, stable=True).indices
    w = weight.gather(-1, rank_to_id)
    rank = torch.arange(vocab_size, device=x.device)
    unlimited = (top_k <= 0) | (top_k > vocab_size)
    limit = torch.where(greedy, 1, torch.where(unlimited, vocab_size, top_k))
    w = torch.where(rank < limit[:, None], w, 0.0)
    before = w.cumsum(-1) - w
    in_nucleus = (before < top_p[:, None] * w.sum(-1, keepdim=True)) | (rank == 0) | (top_p >= 1)[:, None]
    w = torch.where(in_nucleus & ~(w < min_p.clamp(0, 1)[:, None]), w, 0.0)

    kept = torch.zeros_like(w).scatter(-1, rank_to_id, w)
    below = kept.cumsum(-1)
    u = words[0].double() * 2.0**-32 + words[1].double() * 2.0**-64
    ids = (below <= u[:, None] * below[:, -1:]).sum(-1)
    # Rounding may take u times the total to the total itself: then the last token that may be drawn.
    last = torch.where(kept > 0, rank, 0).amax(-1)
    return torch.where(valid, torch.minimum(ids, last), 0), valid


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return ()


def prepare(desc: Desc) -> Callable[..., None]:
    def run(stride: int, p: Parameters, logits: Tensor, ids: Tensor, valid: Tensor) -> None:
        results = sample(
            logits,
            temperature=p.temperature if p.temperatures is None else p.temperatures,
            top_k=p.top_k if p.top_ks is None else p.top_ks,
            top_p=p.top_p if p.top_ps is None else p.top_ps,
            min_p=p.min_p if p.min_ps is None else p.min_ps,
            seed=p.seed if p.seeds is None else p.seeds,
            offset=p.offset if p.offsets is None else p.offsets,
            return_valid=True,
        )
        ids.copy_(results[0])
        valid.copy_(results[1])

    return run
