"""sample in CUDA C++ for sm_90: `kernel_cuda.cu` says how and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepass.launch.cuda import Specialization, load, missing
from onepass.ops.sample import fixed_point

if TYPE_CHECKING:
    from onepass.ops.sample.op import Desc, Parameters

ARCH = "sm_90a"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of the kernel's enum."""

FEW_ROWS = 4
"""Up to so many rows each has a cluster of the largest size; eight of those find no room at once (28 and 41 µs)."""
WARP_CODES = 128
SHARED_LIMIT = 227 << 10
FIRST_BINS, PASS_BINS = 329, 128
"""As the kernel has them."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    reasons = []
    if desc.device.type != "cuda" or torch.version.hip is not None:
        return (f"it runs on NVIDIA GPUs of architecture sm_90, and the tensors are on '{desc.device}'",)
    if torch.cuda.get_device_capability(desc.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(desc.device)
        return (f"it runs on GPUs of architecture sm_90, and {desc.device} is sm_{major}{minor}",)
    if shape_for(desc).shared_bytes(desc.vocab_size) > SHARED_LIMIT:
        reasons.append(f"{desc.vocab_size} tokens do not fit into a cluster's shared memory")
    if not desc.aligned:
        reasons.append("it wants a pointer and a row stride that are multiples of 16 bytes")
    return tuple(reasons) or missing()


class Shape(NamedTuple):
    """How a row is spread. No bit of a result depends on it."""

    cluster: int
    """CTAs a row."""
    threads: int
    """Threads a CTA."""

    def steps(self, vocab_size: int) -> int:
        """How many times a lane takes four codes."""
        return -(-vocab_size // (self.cluster * (self.threads // 32) * WARP_CODES))

    def header_bytes(self) -> int:
        """At least what the kernel keeps beside the codes; a static_assert there compares."""
        sent = self.cluster * (8 * (FIRST_BINS + PASS_BINS) + 20)
        return (sent + 8 * FIRST_BINS + self.threads // 2 + 64 + 127) // 128 * 128

    def shared_bytes(self, vocab_size: int) -> int:
        return self.header_bytes() + self.steps(vocab_size) * self.threads * 16


def shape_for(desc: Desc) -> Shape:
    """Few rows are spread wide; of many, two CTAs share a multiprocessor, and one works while the other waits."""
    many_rows = Shape(8, 512)
    if desc.num_rows <= FEW_ROWS or many_rows.shared_bytes(desc.vocab_size) > SHARED_LIMIT:
        return Shape(16, 512)
    return many_rows


def specialize(desc: Desc, shape: Shape) -> Specialization:
    """The kernel and what it is compiled for."""
    macros = (
        ("LOGITS", DTYPES.index(desc.dtype)),
        ("CLUSTER", shape.cluster),
        ("THREADS", shape.threads),
        ("WIDE_TOP_K", int(desc.top_k_dtype == torch.int64)),
        ("HEADER_BYTES", shape.header_bytes()),
        ("CTAS", 2 if shape.cluster < 16 and shape.threads <= 512 else 1),
    )
    powers = reversed(fixed_point.POLYNOMIAL)
    prelude = "".join(f"#define C{i} {float(c).hex()}f\n" for i, c in enumerate(powers))
    source = Path(__file__).with_suffix(".cu")
    prelude += source.with_name("fixed_point.cu").read_text(encoding="utf-8")
    shared_bytes = shape.shared_bytes(desc.vocab_size)
    return Specialization(
        source, "sample_kernel", macros, shape.threads, shared_bytes, prelude=prelude, cluster=shape.cluster
    )


def prepare(desc: Desc) -> Callable[..., None]:
    return prepare_shape(desc, shape_for(desc))


def prepare_shape(desc: Desc, shape: Shape) -> Callable[..., None]:
    launch = load(specialize(desc, shape), desc.device, ARCH)
    num_rows, vocab_size, itemsize = desc.num_rows, desc.vocab_size, desc.dtype.itemsize
    steps = shape.steps(vocab_size)

    def run(stride: int, p: Parameters, logits: Tensor, ids: Tensor, valid: Tensor) -> None:
        integers = (vocab_size, stride * itemsize, steps, *p.steps(), int(p.counts_rows))
        numbers = (p.top_k, p.seed, p.offset, *(np.float32(v) for v in (p.temperature, p.top_p, p.min_p)))
        launch(num_rows, logits, ids, valid, *p.tensors(), *integers, *numbers)

    return run
