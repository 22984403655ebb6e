"""Tensor maps for the TMA unit of sm_90 GPUs, and launches of kernels that take them.

A kernel takes a map as a `__grid_constant__` parameter of 128 bytes. cuda-core passes its own descriptors, but those
keep the tensor alive that they were made from; here a map holds an address and the geometry, and may be kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from torch import Tensor

from onepass.errors import KernelLoadError

_TYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}


def tensor_map(t: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """A map of `t`'s memory, innermost dimension first: its stride is 1, `strides` are those of the others in elements.

    The TMA unit moves boxes, here with rows of 128 bytes, swizzled in shared memory; what lies outside of `sizes` is
    read as zero and not written. Strides must be multiples of 16 bytes; that of a dimension of size 1 may be 0.
    """
    return _tensor_map(t.data_ptr(), t.dtype, tuple(sizes), tuple(strides), tuple(box))


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    row_bytes = max(16, sizes[0] * dtype.itemsize)
    stride_bytes = [stride * dtype.itemsize or -(-row_bytes // 16) * 16 for stride in strides]
    status, found = driver.cuTensorMapEncodeTiled(
        _TYPES[dtype],
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in stride_bytes],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelLoadError(f"a tensor map of sizes {sizes} and strides {strides}: {status.name}")
    return found


_C_TYPES = {int: ctypes.c_longlong, np.float32: ctypes.c_float}


def launch(kernel: Any, grid: int, threads: int, shared_bytes: int, stream: int, args: Sequence[Any]) -> None:
    """Programmatic dependent launch. Arguments: maps, tensors or None for pointers, int, `numpy.float32`."""
    values: list[Any] = []
    types: list[Any] = []
    for arg in args:
        if arg is None or isinstance(arg, Tensor):
            values.append(0 if arg is None else arg.data_ptr())
            types.append(ctypes.c_void_p)
        else:
            values.append(float(arg) if isinstance(arg, np.float32) else arg)
            types.append(_C_TYPES.get(type(arg)))
    config = _config(grid, threads, shared_bytes, stream)
    (status,) = driver.cuLaunchKernelEx(config, kernel, (tuple(values), tuple(types)), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelLoadError(f"the launch failed: {status.name}")


@lru_cache(maxsize=256)
def _config(grid: int, threads: int, shared_bytes: int, stream: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs, config.numAttrs = [attribute], 1
    return config
