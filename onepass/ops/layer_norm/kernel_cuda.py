"""layer_norm in CUDA C++ for long rows of bfloat16 on sm_90: `kernel_cuda.cu` says how and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onepass.launch.cuda import Specialization, load, missing
from onepass.ops.layer_norm.config import MAX_RESIDENT

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc
    from onepass.ops.norm_call import RowStrides

ARCH = "sm_90a"
SLOTS = 13
CHUNK_BYTES = 16384
THREADS = 640
MAX_ALONE = 32768
"""The longest row of one multiprocessor: its weight and bias fit the registers. Longer ones take two. Clusters of four
do not pay: an H200 cannot place 33 of them at once."""

MAX_HIDDEN_SIZE = 2 * (SLOTS - 2) * CHUNK_BYTES // 2
"""The longest row that leaves two slots for the next one."""

ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")
"""In the order of the kernel's enum."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    reasons = []
    if desc.device.type != "cuda" or torch.version.hip is not None:
        return (f"it runs on NVIDIA GPUs of architecture sm_90, and the tensors are on '{desc.device}'",)
    if torch.cuda.get_device_capability(desc.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(desc.device)
        return (f"it runs on GPUs of architecture sm_90, and {desc.device} is sm_{major}{minor}",)
    if not MAX_RESIDENT < desc.hidden_size <= MAX_HIDDEN_SIZE:
        reasons.append(f"it is for rows of {MAX_RESIDENT + 1} to {MAX_HIDDEN_SIZE} elements, not {desc.hidden_size}")
    if desc.dtype != torch.bfloat16:
        reasons.append("it is for bfloat16")
    if any(d not in (None, desc.dtype) for d in (desc.weight_dtype, desc.bias_dtype)):
        reasons.append("it wants the weight and the bias in x's dtype")
    if desc.has_residual:
        reasons.append("it takes no residual")
    cluster = _cluster(desc.hidden_size)
    if not desc.aligned or desc.hidden_size % (8 * cluster) != 0:
        reasons.append(f"it wants pointers, row strides and rows that are multiples of {16 * cluster} bytes")
    return tuple(reasons) or missing()


def _cluster(hidden_size: int) -> int:
    """Multiprocessors a row."""
    return 1 if hidden_size <= MAX_ALONE else 2


def specialize(desc: Desc) -> Specialization:
    """The kernel and what it is compiled for."""
    cluster = _cluster(desc.hidden_size)
    macros = (
        ("N", desc.hidden_size),
        ("CLUSTER", cluster),
        ("HAS_WEIGHT", int(desc.weight_dtype is not None)),
        ("HAS_BIAS", int(desc.bias_dtype is not None)),
        ("ACTIVATION", ACTIVATIONS.index(desc.activation)),
        ("SLOTS", SLOTS),
    )
    source = Path(__file__).with_suffix(".cu")
    shared_bytes = SLOTS * (CHUNK_BYTES + 2 * 8) + 2 * 8 + 2 * cluster * (16 * 8 + 4)
    return Specialization(source, "layer_norm_long_row_kernel", macros, THREADS, shared_bytes, cluster=cluster)


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(specialize(desc), desc.device, ARCH)
    num_rows = desc.num_rows
    multiprocessors = torch.cuda.get_device_properties(desc.device).multi_processor_count
    grid = min(num_rows, multiprocessors // _cluster(desc.hidden_size))

    def run(
        strides: RowStrides,
        eps: float,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        y: Tensor,
        residual_out: Tensor | None,
    ) -> None:
        launch(grid, x, weight, bias, y, num_rows, 2 * strides.x, 2 * strides.y, np.float32(eps))

    return run
