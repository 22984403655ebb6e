"""Gated activations in Triton: gate and up once in, the product once out, 16 bytes a load.

Bytes: two in and one out an element; about ten instructions an element with SiLU, which an H200 issues in a quarter of
the time that the bytes take. What counts is therefore the latency of one program: one load from gate and one from up a
thread, and nothing before them. Twice as many took 0.3 µs longer for one row of 14336 (1.56 against 1.25), and no less
for 8192 rows.

Programmatic dependent launch costs nothing even with 100,000 programs, which wait for memory: 161.9 µs for 8192 rows
against 162.5 without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.triton_math import activate, narrow, widen

if TYPE_CHECKING:
    from onepass.ops.gated_activation.op import Desc, RowStrides

NUM_WARPS = 4
BLOCK_BYTES = 32 * NUM_WARPS * 16
"""Of gate, or of up, that a program loads: 16 bytes a thread."""


@triton.jit
def gated_activation_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    num_cols,
    blocks_per_row,
    stride_gm,
    stride_um,
    stride_om,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of one row a program. Without `up_ptr`, up follows gate in the same row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row = program // blocks_per_row
    start = (program - row * blocks_per_row).to(tl.int64) * BLOCK
    row = row.to(tl.int64)
    gate_ptr += row * stride_gm + start
    if up_ptr is None:
        up_ptr = gate_ptr + num_cols
    else:
        up_ptr += row * stride_um + start
    out_ptr += row * stride_om + start
    lanes = tl.arange(0, BLOCK)
    # As 32-bit numbers: a contiguous tensor is one row, of more than 2^31 columns perhaps.
    mask = lanes < tl.minimum(num_cols - start, BLOCK).to(tl.int32)
    gate = tl.load(gate_ptr + lanes, mask=mask, other=0.0)
    up = tl.load(up_ptr + lanes, mask=mask, other=0.0)
    result = activate(widen(gate, PTX), ACTIVATION, PTX) * widen(up, PTX)
    tl.store(out_ptr + lanes, narrow(result, out_ptr.dtype.element_ty), mask=mask)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel and what it is compiled for."""
    x = pointer(desc.dtype)
    types = (x, pointer(None if desc.packed else desc.dtype), x, "i64", "i32", "i64", "i64", "i64")
    multiples = (0, 1, 2, 5, 6, 7) if desc.aligned else ()
    if desc.num_cols % 16 == 0:
        multiples += (3,)
    ptx = features.ptx and desc.dtype != torch.float32
    constants = (desc.activation, _block(desc), ptx, features.pdl)
    return gated_activation_kernel, Specialization(types, constants, multiples, NUM_WARPS, features.pdl)


def _block(desc: Desc) -> int:
    return BLOCK_BYTES // desc.dtype.itemsize


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(*specialize(desc, features(desc.device)), desc.device)
    blocks_per_row = -(-desc.num_cols // _block(desc))
    grid, num_cols = desc.num_rows * blocks_per_row, desc.num_cols

    def run(strides: RowStrides, gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        # The stride of a single row means nothing, and may be no multiple of 16.
        launch(grid, (gate, up, out), num_cols, blocks_per_row, *(strides if desc.num_rows > 1 else (0, 0, 0)))

    return run
