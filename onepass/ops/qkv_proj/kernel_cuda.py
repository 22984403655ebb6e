"""qkv_proj in CUDA C++ for up to 16 tokens of bfloat16 on sm_90: `kernel_cuda.cu` says how and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onepass.launch.cuda import Specialization, load, missing
from onepass.ops.qkv_proj.op import FEW_TOKENS, Call

if TYPE_CHECKING:
    from onepass.ops.qkv_proj.op import Desc

ARCH = "sm_90a"
WARPS = 8
MAX_TILES = 4


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    reasons = []
    if desc.device.type != "cuda" or torch.version.hip is not None:
        return (f"it runs on NVIDIA GPUs of architecture sm_90, and the tensors are on '{desc.device}'",)
    if torch.cuda.get_device_capability(desc.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(desc.device)
        return (f"it runs on GPUs of architecture sm_90, and {desc.device} is sm_{major}{minor}",)
    if desc.num_tokens > FEW_TOKENS:
        reasons.append(f"it is for up to {FEW_TOKENS} tokens, not {desc.num_tokens}")
    if desc.dtype != torch.bfloat16:
        reasons.append("it is for bfloat16")
    if any(d not in (None, desc.dtype) for d in (desc.bias_dtype, desc.norm_weight_dtype)):
        reasons.append("it wants the bias and the norm's weight in x's dtype")
    if not desc.aligned or desc.hidden_size % 8 != 0:
        reasons.append("it wants pointers, strides and hidden_size to be multiples of 16 bytes")
    if desc.head_dim % 16 != 0 or desc.rotary_dim % 16 != 0:
        reasons.append("it wants head_dim and rotary_dim to be multiples of 16")
    return tuple(reasons) or missing()


def tiles_of(desc: Desc, multiprocessors: int) -> int:
    """Tiles a block: as many as give every multiprocessor one block, within what registers hold."""
    tiles = (desc.num_q_heads + 2 * desc.num_kv_heads) * desc.head_dim // 16
    return min(MAX_TILES, -(-tiles // multiprocessors))


def specialize(desc: Desc, multiprocessors: int) -> Specialization:
    """The kernel and what it is compiled for."""
    tiles, columns = tiles_of(desc, multiprocessors), 1 if desc.num_tokens <= 8 else 2
    after = desc.q_norm_dtype is not None  # a kernel of its own follows
    # What a thread keeps in flight: 16 bytes of two rows of each tile, of each 8 tokens and of the norm's weight.
    stages = max(2, 32 // (2 * tiles + columns + 1))
    macros = (
        ("HIDDEN", desc.hidden_size),
        ("HEAD_DIM", desc.head_dim),
        ("ROTARY", 0 if after else desc.rotary_dim),
        ("INTERLEAVED", int(desc.interleaved)),
        ("NUM_Q_HEADS", desc.num_q_heads),
        ("NUM_KV_HEADS", desc.num_kv_heads),
        ("HAS_NORM", int(desc.norm_weight_dtype is not None)),
        ("OFFSET", int(desc.has_offset)),
        ("HAS_BIAS", int(desc.bias_dtype is not None)),
        ("HAS_CACHE", int(desc.has_cache and not after)),
        ("POSITION_BITS", 32 if desc.position_dtype == torch.int32 else 64),
        ("TILES", tiles),
        ("NT", columns),
        ("WARPS", WARPS),
        ("STAGES", min(stages, -(-desc.hidden_size // (32 * WARPS)))),
    )
    shared_bytes = 4 * WARPS * columns * (128 * tiles + 8)
    source = Path(__file__).with_suffix(".cu")
    return Specialization(source, "qkv_proj_kernel", macros, 32 * WARPS, shared_bytes)


def prepare(desc: Desc) -> Callable[..., None]:
    multiprocessors = torch.cuda.get_device_properties(desc.device).multi_processor_count
    special = specialize(desc, multiprocessors)
    launch = load(special, desc.device, ARCH)
    tiles = (desc.num_q_heads + 2 * desc.num_kv_heads) * desc.head_dim // 16
    grid, num_tokens = -(-tiles // tiles_of(desc, multiprocessors)), desc.num_tokens
    after = None
    if desc.q_norm_dtype is not None:
        from onepass.ops.qkv_proj.kernel_triton import after_launcher

        after = after_launcher(desc, in_place=True, bias_done=True)

    def run(
        call: Call,
        x: Tensor,
        w_qkv: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        table: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        positions: Tensor | None,
        slots: Tensor | None,
        *outputs: Tensor,
    ) -> None:
        launch(
            *(grid, x, w_qkv, bias, norm_weight, table, positions, slots, key_cache, value_cache, *outputs),
            *(num_tokens, call.x, call.w, call.cos_sin, call.num_positions),
            *call[11:17],
            *(call.page_size, call.num_slots, *call[17:], call.positions, call.slots),
            *(np.float32(call.norm_eps), np.float32(call.norm_weight_offset)),
        )
        if after is not None:
            inputs = (*outputs, None, q_norm, k_norm, table, key_cache, value_cache, positions, slots)
            strides = (call.q_token, call.k_token, call.v_token, call.q_head, call.k_head, call.v_head)
            after(call, (*inputs, *outputs), strides)

    return run
