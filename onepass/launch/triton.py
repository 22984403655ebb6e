"""Compiles Triton kernels for an explicit specialization, and launches them with little overhead.

Triton's own launch specialises a kernel on every integer it is given (is it 1, is it a multiple of 16?) and
works that out at each call. Here the op says once what a kernel is specialised on, so a new batch size never
compiles anything, and a call is one look-up and one driver launch. The same `compile` serves the compile checks,
which need no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from onepass import settings
from onepass.launch.cache import cache_folder

TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}

Launcher = Callable[..., None]
"""launcher(grid, tensors, *numbers): the kernel's pointer arguments (None where absent), then its numbers."""

_compile_lock = threading.Lock()
_loaded: dict[tuple[Any, ...], Launcher] = {}


class Specialization(NamedTuple):
    """All that one compiled kernel depends on, apart from the target."""

    types: tuple[str, ...]
    """Triton types of the run-time arguments, in order: "*bf16", "i32", "i64", "fp32"; "none" for an absent pointer."""
    constants: tuple[Any, ...]
    """Values of the constexpr arguments, which follow the run-time arguments in the kernel's signature."""
    multiples_of_16: tuple[int, ...]
    """Indices of run-time arguments whose value is a multiple of 16 (a pointer: of 16 bytes)."""
    num_warps: int
    pdl: bool
    """Launched by programmatic dependent launch: the kernel waits itself for the kernel before it."""
    num_stages: int = 3
    """How deep loops over loads are pipelined where they do not say it themselves."""


class Features(NamedTuple):
    """What kernels may use of a device."""

    ptx: bool
    """Inline PTX: NVIDIA GPUs, outside the interpreter."""
    pdl: bool
    """Programmatic dependent launch (sm_90 and newer): a kernel's launch overlaps the end of the kernel before it."""
    wgmma: bool = False
    """Four warps multiply together, with operands in shared memory: sm_90 and the data-centre Blackwells."""
    shared_bytes: int = 99 << 10
    """Shared memory that a block may have."""


_SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}
"""By architecture where it is more than the 99 KB of the others, from the CUDA C++ Programming Guide."""


def features_of(target: GPUTarget) -> Features:
    """The features of a compile target."""
    nvidia = target.backend == "cuda"
    if not nvidia:
        return Features(ptx=False, pdl=False, shared_bytes=64 << 10)
    shared_bytes = _SHARED_BYTES.get(target.arch, 99 << 10)
    return Features(True, target.arch >= 90, target.arch // 10 in (9, 10, 11), shared_bytes)


def features(device: torch.device) -> Features:
    """The features of the device a call runs on."""
    if settings.triton_interpret():
        return Features(ptx=False, pdl=False)
    with torch.cuda.device(device):
        return features_of(driver.active.get_current_target())


def pointer(dtype: torch.dtype | None) -> str:
    """The Triton type of a pointer to `dtype`; None for an absent tensor."""
    return "none" if dtype is None else f"*{TYPE_NAMES[dtype]}"


def compile_kernel(kernel: Any, special: Specialization, target: GPUTarget) -> CompiledKernel:
    """Compile `kernel` (a @triton.jit function) for a target, from the disk cache where it is there. Needs no GPU."""
    names = kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, kind in enumerate(special.types):
        signature[names[i]] = "constexpr" if kind == "none" else kind
        if kind == "none":
            constants[(i,)] = None
        elif i in special.multiples_of_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    for i, value in enumerate(special.constants, start=len(special.types)):
        signature[names[i]] = "constexpr"
        constants[(i,)] = value
    options: dict[str, Any] = {
        "num_warps": special.num_warps,
        "num_stages": special.num_stages,
        "enable_fp_fusion": True,
    }
    if special.pdl:
        options["launch_pdl"] = True
    with _compile_lock, _cache_scope():
        return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def load(kernel: Any, special: Specialization, device: torch.device) -> Launcher:
    """`kernel` compiled for `special` and loaded on `device`; the same launcher for the same arguments."""
    key = (kernel, special, device)
    launcher = _loaded.get(key)
    if launcher is None:
        launcher = _loaded[key] = _interpreted(kernel, special) if settings.triton_interpret() else _load(*key)
    return launcher


def _interpreted(kernel: Any, special: Specialization) -> Launcher:
    def launcher(grid: int, tensors: tuple[torch.Tensor | None, ...], *numbers: float) -> None:
        kernel[(grid,)](*tensors, *numbers, *special.constants)

    return launcher


def _load(kernel: Any, special: Specialization, device: torch.device) -> Launcher:
    with torch.cuda.device(device):
        compiled = compile_kernel(kernel, special, driver.active.get_current_target())
        with _compile_lock, _cache_scope():
            run = compiled.run  # loads the module and, in some versions of Triton, compiles a launcher
    function, packed, constants = compiled.function, compiled.packed_metadata, special.constants
    index = device.index
    current_stream, current_device = driver.active.get_current_stream, driver.active.get_current_device

    def launcher(grid: int, tensors: tuple[torch.Tensor | None, ...], *numbers: float) -> None:
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        run(grid, 1, 1, current_stream(index), function, packed, None, None, None, *pointers, *numbers, *constants)

    def guarded_launcher(grid: int, tensors: tuple[torch.Tensor | None, ...], *numbers: float) -> None:
        if current_device() == index:
            launcher(grid, tensors, *numbers)
        else:
            with torch.cuda.device(index):
                launcher(grid, tensors, *numbers)

    return launcher if torch.cuda.device_count() == 1 else guarded_launcher


@contextmanager
def _cache_scope() -> Iterator[None]:
    """Point Triton's disk cache at ours for as long as we compile."""
    with knobs.cache.scope():
        knobs.cache.dir = str(cache_folder("triton"))
        yield


def unsupported_device(device: torch.device) -> tuple[str, ...]:
    """Why Triton cannot run on `device`; empty when it can."""
    if settings.triton_interpret():
        return ()
    if device.type != "cuda":
        return (f"Triton runs on a GPU, and the tensors are on '{device}' (TRITON_INTERPRET=1 interprets it on a CPU)",)
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return (f"it needs an sm_80 or newer GPU, and {device} is sm_{major}{minor}",)
    return ()


def missing_float8(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Why Triton cannot convert `dtype` on `device`, where that is float8; empty when it can."""
    if dtype != torch.float8_e4m3fn or settings.triton_interpret():
        return ()
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        return (f"float8 needs an sm_89 or newer GPU, and {device} is sm_{major}{minor}",)
    return ()
