"""The copy that a kernel is held against, or the read, where it reads much more than it writes: the fastest at hand.

On a GPU the driver's copy is not always that: on an H200, in a CUDA graph, it takes 1.5 times as long as a plain copy
kernel for 512 MB. Both are measured, and the faster one is the ceiling.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch

from onepass.bench.measure import Call

Copy = Callable[[torch.Tensor, torch.Tensor], object]


def copies(device: torch.device) -> list[Copy]:
    """Functions (target, source) that copy contiguous tensors of one shape, the driver's first."""
    found: list[Copy] = [torch.Tensor.copy_]
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from onepass.bench.copy_kernel import copy

        found.append(copy)
    return found


def read_calls(device: torch.device, sources: Sequence[torch.Tensor]) -> list[list[Call]]:
    """For each kind of read the calls that read every source, a contiguous tensor: torch's sum, a plain kernel."""
    found: list[list[Call]] = [[partial(torch.sum, _words(source)) for source in sources]]
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from onepass.bench.copy_kernel import read, read_programs

        sums = [torch.empty(read_programs(source), device=device) for source in sources]
        found.append([partial(read, to, source) for to, source in zip(sums, sources, strict=True)])
    return found


def _words(source: torch.Tensor) -> torch.Tensor:
    """The bytes as float32, which torch sums fastest: a few bytes less where they are no multiple of four."""
    flat = source.view(-1)
    return flat[: flat.numel() * flat.element_size() // 4 * 4 // flat.element_size()].view(torch.float32)


def copy_calls(device: torch.device, sources: Sequence[torch.Tensor]) -> list[list[Call]]:
    """For each kind of copy the calls that copy every source into memory of its own, the same for all kinds."""
    pairs = [(torch.empty_like(source), source) for source in sources]
    return [[partial(copy, target, source) for target, source in pairs] for copy in copies(device)]
