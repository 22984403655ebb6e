"""merge_attention_states in Triton: some rows of both states a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.triton_math import narrow, widen

if TYPE_CHECKING:
    from onepass.ops.merge_attention_states.op import Desc, Strides

NUM_WARPS = 4
MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: each program then takes 1.2 ns longer to start."""


@triton.jit
def merge_attention_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    stride_ab,
    stride_al,
    stride_ah,
    stride_bb,
    stride_bl,
    stride_bh,
    stride_ob,
    stride_ol,
    stride_oh,
    stride_lab,
    stride_lah,
    stride_lal,
    stride_lbb,
    stride_lbh,
    stride_lbl,
    stride_lb,
    stride_lh,
    stride_ll,
    num_rows,
    q_len,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS of [batch, q_len, heads] a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    head, token = row % HEADS, row // HEADS
    query, sequence = token % q_len, token // q_len
    d = tl.arange(0, BLOCK_D)
    a_at = sequence * stride_lab + head * stride_lah + query * stride_lal
    b_at = sequence * stride_lbb + head * stride_lbh + query * stride_lbl
    a = tl.load(lse_a_ptr + a_at, mask=row_mask, other=0.0)
    b = tl.load(lse_b_ptr + b_at, mask=row_mask, other=0.0)
    # The values of an empty state are not read.
    a_mask = (row_mask & (a != -float("inf")))[:, None] & (d < HEAD_DIM)[None, :]
    b_mask = (row_mask & (b != -float("inf")))[:, None] & (d < HEAD_DIM)[None, :]
    a_rows = out_a_ptr + sequence * stride_ab + query * stride_al + head * stride_ah
    b_rows = out_b_ptr + sequence * stride_bb + query * stride_bl + head * stride_bh
    out_a = widen(tl.load(a_rows[:, None] + d[None, :], mask=a_mask, other=0.0), False)
    out_b = widen(tl.load(b_rows[:, None] + d[None, :], mask=b_mask, other=0.0), False)
    top = tl.maximum(a, b)
    safe = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - safe), tl.exp(b - safe)
    total = weight_a + weight_b
    lse = safe + tl.log(total)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = out_a * (weight_a / divisor)[:, None] + out_b * (weight_b / divisor)[:, None]
    at = sequence * stride_ob + query * stride_ol + head * stride_oh
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + at[:, None] + d[None, :], narrow(out, out_ptr.dtype.element_ty), mask=mask)
    lse_at = sequence * stride_lb + head * stride_lh + query * stride_ll
    tl.store(lse_ptr + lse_at, tl.where(total == 0.0, -float("inf"), lse), mask=row_mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    out = pointer(desc.dtype)
    types = (out, "*fp32", out, "*fp32", out, "*fp32", *("i64",) * 20)
    multiples = (0, 2, 4, *range(6, 15)) if desc.aligned else ()
    pdl = features.pdl and _grid(desc) < MANY_PROGRAMS
    constants = (desc.num_heads, desc.head_dim, _rows(desc), triton.next_power_of_2(desc.head_dim), pdl)
    return merge_attention_states_kernel, Specialization(types, constants, multiples, NUM_WARPS, pdl)


def _rows(desc: Desc) -> int:
    """16 bytes and one load a thread and state."""
    lanes = 32 * NUM_WARPS * 16 // desc.dtype.itemsize
    return max(1, lanes // triton.next_power_of_2(desc.head_dim))


def _grid(desc: Desc) -> int:
    return -(-desc.batch * desc.q_len * desc.num_heads // _rows(desc))


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    grid, sizes = _grid(desc), (desc.batch * desc.q_len * desc.num_heads, desc.q_len)

    def run(
        strides: Strides, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        launch(grid, (out_a, lse_a, out_b, lse_b, out, lse), *strides, *sizes)

    return run
