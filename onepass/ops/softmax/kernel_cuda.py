"""softmax in CUDA C++ for long rows on sm_90: `kernel_cuda.cu` says how and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onepass.launch.cuda import Specialization, load, missing
from onepass.ops.row_config import MAX_RESIDENT

if TYPE_CHECKING:
    from onepass.ops.softmax.op import Desc, RowStrides

ARCH = "sm_90a"

ELEMENTS = 32
"""Of a row in a thread's registers."""

MAX_VOCAB_SIZE = 262144
"""The longest row: 8 blocks of 1024 threads."""

FEW_ROWS = 64
"""Up to this many rows, more and smaller blocks a row: one row then uses more multiprocessors. On an H200 one row of
128256 float32 takes 3.3 µs with 16 blocks and 3.9 with 8, 64 rows 21.0 with both, 256 rows 74.4 and 71.9."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the kernel's enum."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    reasons = []
    if desc.device.type != "cuda" or torch.version.hip is not None:
        return (f"it runs on NVIDIA GPUs of architecture sm_90, and the tensors are on '{desc.device}'",)
    if torch.cuda.get_device_capability(desc.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(desc.device)
        return (f"it runs on GPUs of architecture sm_90, and {desc.device} is sm_{major}{minor}",)
    if not MAX_RESIDENT < desc.vocab_size <= MAX_VOCAB_SIZE:
        reasons.append(f"it is for rows of {MAX_RESIDENT + 1} to {MAX_VOCAB_SIZE} elements, not {desc.vocab_size}")
    if not desc.aligned or desc.vocab_size * desc.dtype.itemsize % 16 != 0:
        reasons.append("it wants pointers, row strides and rows that are multiples of 16 bytes")
    return tuple(reasons) or missing()


def specialize(desc: Desc, cluster: int | None = None) -> Specialization:
    """The kernel and what it is compiled for."""
    cluster = cluster or (16 if desc.num_rows <= FEW_ROWS else 8)
    # A multiple of 16 warps, so that clusters of 16 blocks and of 8 hold the same elements in the same threads.
    all_threads = 512 * -(-desc.vocab_size // (512 * ELEMENTS))
    macros = (
        ("N", desc.vocab_size),
        ("ELEMENT", DTYPES.index(desc.dtype)),
        ("CLUSTER", cluster),
        ("THREADS", all_threads // cluster),
        ("GREEDY", int(desc.greedy)),
        ("PER_ROW", int(desc.per_row)),
    )
    source = Path(__file__).with_suffix(".cu")
    return Specialization(source, "softmax_cluster_kernel", macros, all_threads // cluster, 0, cluster=cluster)


def prepare(desc: Desc) -> Callable[..., None]:
    launch = load(specialize(desc), desc.device, ARCH)
    num_rows, size = desc.num_rows, desc.dtype.itemsize

    def run(strides: RowStrides, temperature: float, logits: Tensor, temperatures: Tensor | None, out: Tensor) -> None:
        byte_strides = (strides.logits * size, strides.temperature, strides.out * size)
        launch(num_rows, logits, temperatures, out, *byte_strides, np.float32(temperature))

    return run
