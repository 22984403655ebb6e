"""flash_attention in CUDA C++ for half precision on sm_90: `kernel_cuda.cu` says how."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepass.launch.cuda import Specialization, load, missing
from onepass.ops.flash_attention.desc import UNBOUNDED

if TYPE_CHECKING:
    from onepass.ops.flash_attention.op import Desc, Strides

ARCH = "sm_90a"
MAX_HEAD_DIM = 256
L2_BYTES = 24 << 20
"""What the keys and values of the heads that run side by side should take."""

_FAR = 1 << 30
"""Further than any key; positions added to it stay in 32 bits."""


class Config(NamedTuple):
    """One shape of the kernel."""

    groups: int
    """Warp groups, each with 64 queries."""
    block_n: int
    """Keys at a time. It depends on head_dim alone, as a row's bits depend on it."""
    stages: int


def config(desc: Desc) -> Config:
    """Registers bound it: scores, weights and outputs of 64 queries a group of 128 threads."""
    if desc.head_dim <= 64:
        return Config(3 if desc.softcap is None else 2, 128, 2)
    return Config(2, 128, 2) if desc.head_dim <= 128 else Config(2, 80, 2)


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    if desc.device.type != "cuda" or torch.version.hip is not None:
        return (f"it runs on NVIDIA GPUs of architecture sm_90, and the tensors are on '{desc.device}'",)
    if torch.cuda.get_device_capability(desc.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(desc.device)
        return (f"it runs on GPUs of architecture sm_90, and {desc.device} is sm_{major}{minor}",)
    reasons = []
    if desc.dtype == torch.float32:
        reasons.append("it is for bfloat16 and float16")
    if desc.head_dim % 8 != 0 or desc.head_dim > MAX_HEAD_DIM:
        reasons.append(f"it is for a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, not {desc.head_dim}")
    if not desc.aligned:
        reasons.append("it wants pointers and strides that are multiples of 16 bytes")
    if desc.softmax_scale <= 0:
        reasons.append(f"it wants a softmax_scale above 0, not {desc.softmax_scale}")
    if desc.sinks_dtype not in (None, torch.float32, desc.dtype):
        reasons.append("it wants sinks in float32 or in q's dtype")
    if max(desc.total_q, desc.total_k, desc.seqlen_q, desc.seqlen_k) >= _FAR:
        reasons.append(f"it is for fewer than {_FAR} tokens")
    return tuple(reasons) or missing()


def specialize(desc: Desc) -> Specialization:
    """The kernel and what it is compiled for."""
    groups, block_n, stages = config(desc)
    panels = -(-desc.head_dim // 64)
    macros = (
        ("D", desc.head_dim),
        ("BLOCK_N", block_n),
        ("GROUPS", groups),
        ("STAGES", stages),
        ("RIGHT_BOUND", int(desc.right != UNBOUNDED or desc.left != UNBOUNDED)),
        ("LEFT_BOUND", int(desc.left != UNBOUNDED)),
        ("SOFTCAP", int(desc.softcap is not None)),
        ("VARLEN", int(desc.varlen)),
        ("WIDE_INDEX", int(desc.index_dtype == torch.int64)),
        ("HALF_SINKS", int(desc.sinks_dtype == desc.dtype)),
        ("BFLOAT16", int(desc.dtype == torch.bfloat16)),
    )
    shared_bytes = panels * 128 * (64 * groups + 2 * stages * block_n) + 1024 + 8 * (2 * groups + 4 * stages)
    source = Path(__file__).with_suffix(".cu")
    instructions = source.with_name("instructions.cu").read_text(encoding="utf-8")
    return Specialization(
        source,
        "flash_attention_kernel",
        macros,
        128 * (groups + 1),
        shared_bytes,
        prelude=instructions + _products(block_n, desc.head_dim, desc.dtype),
        tensor_maps=True,
    )


def _products(block_n: int, head_dim: int, dtype: torch.dtype) -> str:
    """The two matrix instructions, whose operands are as many registers as the shape says."""
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    scores, outputs = block_n // 2, head_dim // 2

    def registers(count: int) -> str:
        return ", ".join(f"%{i}" for i in range(count))

    def operands(count: int) -> str:
        return ", ".join(f'"+f"(d[{i}])' for i in range(count))

    return f"""
__device__ __forceinline__ void wgmma_scores(float (&d)[{scores}], unsigned long long a, unsigned long long b,
                                             bool add) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{scores + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{block_n}k16.f32.{kind}.{kind} {{{registers(scores)}}},"
        " %{scores}, %{scores + 1}, p, 1, 1, 0, 0; }}"
        : {operands(scores)} : "l"(a), "l"(b), "r"((int)add));
}}
__device__ __forceinline__ void wgmma_outputs(float (&d)[{outputs}], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                              unsigned long long v) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{head_dim}k16.f32.{kind}.{kind} {{{registers(outputs)}}},"
        " {{%{outputs}, %{outputs + 1}, %{outputs + 2}, %{outputs + 3}}}, %{outputs + 4}, 1, 1, 1, 1;"
        : {operands(outputs)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(v));
}}
"""


def prepare(desc: Desc) -> Callable[..., None]:
    from onepass.launch.cuda_maps import tensor_map

    launch = load(specialize(desc), desc.device, ARCH)
    groups, block_n, _ = config(desc)
    columns = desc.batch * desc.num_q_heads
    tiles = -(-desc.seqlen_q // (64 * groups)) * columns
    grid = min(tiles, torch.cuda.get_device_properties(desc.device).multi_processor_count)
    head_bytes = 2 * desc.seqlen_k * desc.head_dim * desc.dtype.itemsize
    section = min(columns, max(1, L2_BYTES // max(1, head_bytes)) * desc.group)
    # A softcap counts in the unit of the scores before they are scaled.
    numbers = (
        np.float32(desc.softmax_scale / math.log(2.0)),
        np.float32((desc.softcap or 0.0) / desc.softmax_scale),
        desc.batch,
        desc.num_q_heads,
        desc.num_kv_heads,
        desc.seqlen_q,
        desc.seqlen_k,
        _FAR if desc.left == UNBOUNDED else min(desc.left, _FAR),
        _FAR if desc.right == UNBOUNDED else min(desc.right, _FAR),
        section,
        desc.total_q,
    )
    batches = 1 if desc.varlen else desc.batch

    def run(
        strides: Strides,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> None:
        if grid == 0:
            return
        if k.numel() == 0:
            k = v = q  # nothing of them is read, but a map needs memory
        maps = [
            tensor_map(t, (t.shape[-1], t.shape[-3], t.shape[-2], batches), (tokens, heads, batch), (64, rows, 1, 1))
            for t, (batch, tokens, heads), rows in zip((q, k, v, out), strides, (64, block_n, block_n, 64), strict=True)
        ]
        _, out_tokens, out_heads = strides.out
        launch(grid, *maps, out, out_tokens, out_heads, lse, sinks, cu_seqlens_q, cu_seqlens_k, *numbers)

    return run
