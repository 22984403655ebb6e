"""LayerNorm + SiLU as one would write it after Triton's tutorials: one row a program, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def layer_norm_silu_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, stride, n_cols, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n_cols + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    y = y * tl.sigmoid(y)
    tl.store(y_ptr + row * stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def layer_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """silu(layer_norm(x)) for a contiguous x."""
    x = x.contiguous()
    y = torch.empty_like(x)
    n_cols = x.shape[-1]
    block = triton.next_power_of_2(n_cols)
    num_warps = min(max(block // 512, 1), 32)
    rows = x.numel() // n_cols
    layer_norm_silu_kernel[(rows,)](x, weight, bias, y, n_cols, n_cols, eps, BLOCK=block, num_warps=num_warps)
    return y
