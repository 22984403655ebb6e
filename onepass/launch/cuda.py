"""Compiles CUDA C++ at run time with NVRTC, through cuda-core, and launches it.

A kernel is specialised by macros, and a cubin is made for each set of them; compiling needs no GPU. cuda-core keeps
the cubins on disk, by source, options and compiler version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onepass.errors import KernelLoadError
from onepass.launch.cache import cache_folder

INSTALL = "pip install 'cuda-core[cu13]'"

_compile_lock = threading.Lock()
_loaded: dict[tuple[Any, ...], Callable[..., None]] = {}


class Specialization(NamedTuple):
    """All that one compiled kernel depends on, apart from the architecture."""

    source: Path
    name: str
    """The kernel, declared extern "C"."""
    macros: tuple[tuple[str, int], ...]
    threads: int
    shared_bytes: int
    """Dynamic shared memory of a block."""
    prelude: str = ""
    """Generated code that stands before the source."""
    tensor_maps: bool = False
    """Its arguments include tensor maps (cuda_maps.py)."""
    cluster: int = 1
    """Blocks of a cluster; more than 8 may find too few neighbouring multiprocessors on some GPUs."""


@lru_cache(maxsize=1)
def missing() -> tuple[str, ...]:
    """Why CUDA C++ cannot be compiled here; empty when it can."""
    try:
        import cuda.core  # noqa: F401
    except ImportError as error:
        return (f"it needs the package cuda-core, with NVRTC: {INSTALL} ({error})",)
    return ()


def compile_kernel(special: Specialization, arch: str) -> Any:
    """The cubin (a `cuda.core.ObjectCode`) for an architecture such as "sm_90a"."""
    from cuda.core import Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    macros = [(name, str(value)) for name, value in special.macros]
    options = ProgramOptions(arch=arch, std="c++17", define_macro=macros)
    with _compile_lock, FileStreamProgramCache(cache_folder("cuda")) as cache:
        source = special.prelude + special.source.read_text(encoding="utf-8")
        return Program(source, "c++", options).compile("cubin", cache=cache)


def load(special: Specialization, device: torch.device, arch: str) -> Callable[..., None]:
    """A function (grid, *args) that launches the kernel on the device's current stream.

    `grid` counts clusters: blocks, where a cluster is one block. Arguments: tensors or None for pointers, int for
    64-bit integers, `numpy.float32` for floats. Launched by programmatic dependent launch: the kernel waits itself
    for the kernel before it.
    """
    key = (special, device)
    launcher = _loaded.get(key)
    if launcher is None:
        with torch.cuda.device(device):
            launcher = _loaded[key] = _load(special, device, arch)
    return launcher


def _load(special: Specialization, device: torch.device, arch: str) -> Callable[..., None]:
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, Stream, launch

    Device(device.index).set_current()
    kernel = compile_kernel(special, arch).get_kernel(special.name)
    for attribute, value in _attributes(special):
        # cuda-core has no call for these.
        (status,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, device.index)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelLoadError(
                f"{special.name} needs {special.shared_bytes} bytes of shared memory a block and clusters of "
                f"{special.cluster} blocks: {status.name}"
            )

    @lru_cache(maxsize=64)
    def config(grid: int) -> Any:
        return LaunchConfig(
            grid=grid,
            cluster=special.cluster if special.cluster > 1 else None,
            block=special.threads,
            shmem_size=special.shared_bytes,
            programmatic_stream_serialization=True,
        )

    if special.tensor_maps:
        return _map_launcher(special, kernel, device)

    def launcher(grid: int, *args: Any) -> None:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 if a is None else a for a in args]
        with torch.cuda.device(device):
            stream = Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
            launch(stream, config(grid), kernel, *values)

    return launcher


def _map_launcher(special: Specialization, kernel: Any, device: torch.device) -> Callable[..., None]:
    from cuda.bindings import driver

    from onepass.launch import cuda_maps

    function = driver.CUfunction(int(kernel.handle))  # a CUkernel, which launches take as well

    def launcher(grid: int, *args: Any) -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            cuda_maps.launch(function, grid, special.threads, special.shared_bytes, stream, args)

    return launcher


def _attributes(special: Specialization) -> list[tuple[Any, int]]:
    """What has to be asked for: more than 48 KB of shared memory a block, more than 8 blocks a cluster."""
    from cuda.bindings.driver import CUfunction_attribute as Attribute

    found = [(Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, special.shared_bytes)]
    if special.cluster > 8:
        found.append((Attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    return found
