"""Compiling and calling CPU kernels.

A kernel is a Python function in the subset that Numba compiles, marked with `@kernel`. It works on rows: its last
three parameters are `num_rows`, `chunk` and `counter`, as `run_rows` passes them. It is compiled once for each
combination of parameter types, on first use, and kept on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding
from numba import njit, types
from numba.core import config as _numba_config

from onepass.launch import cpu_cache, cpu_gather, cpu_math, cpu_memory, cpu_tile, cpu_vector
from onepass.launch.cpu_memory import Pointer
from onepass.launch.cpu_threads import run_rows
from onepass.launch.cpu_vector import Choice

__all__ = ["Kernel", "choice", "kernel", "missing_features", "pointer", "run_rows", "streams"]

# Numba fills this module when it is imported, which type checkers cannot see.
_config: Any = _numba_config

# An output of at least this many bytes goes past the caches: it would not stay in them anyway.
_STREAMING_BYTES = 32 << 20

_STORAGE = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.int32: "int32",
    torch.int64: "int64",
}


def pointer(dtype: torch.dtype | None, absent: str = "zeros") -> Pointer:
    """The parameter type of a tensor of this dtype; for None the stand-in `absent` ("ones", "zeros", "nowhere")."""
    return Pointer(absent if dtype is None else _STORAGE[dtype])


def choice(name: object) -> Choice:
    """The parameter type that fixes a name, such as an activation's, when the kernel is compiled."""
    return Choice(str(name))


class Kernel:
    """A kernel's Python function and what was compiled from it."""

    def __init__(self, function: Callable[..., None]) -> None:
        dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
        file = inspect.getfile(function)
        helpers = (cpu_gather, cpu_math, cpu_memory, cpu_tile, cpu_vector)
        sources = {file, __file__, *(str(helper.__file__) for helper in helpers)}
        sources |= _files_of_inlined(function)
        name = f"{Path(file).parent.name}.{function.__name__}"
        dispatcher._cache = cpu_cache.KernelCache(name, tuple(sorted(sources)))
        self._dispatcher = dispatcher

    def compiled(self, *parameters: Any) -> Callable[..., None]:
        """The function for these parameter types: from this process, from disk, or compiled now.

        Calling it converts Python numbers to the parameter types and checks nothing else. Parameter types are
        `pointer(...)`, `choice(...)`, and Python's `int`, `float` and `bool`.
        """
        numbers = {int: types.int64, float: types.float64, bool: types.boolean}
        return self._dispatcher.compile(types.void(*(numbers.get(p, p) for p in parameters)))

    @property
    def cache_hits(self) -> int:
        """How many functions came from disk in this process."""
        return sum(self._dispatcher.stats.cache_hits.values())

    def assembly(self) -> list[str]:
        """The machine code of every function compiled in this process, as text."""
        return list(self._dispatcher.inspect_asm().values())


def _files_of_inlined(function: Callable[..., None]) -> set[str]:
    """The files of the compiled functions that a kernel names, such as one that ops share."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    inlined = (getattr(value, "py_func", None) for value in named)
    return {inspect.getfile(f) for f in inlined if f is not None}


def kernel(function: Callable[..., None]) -> Kernel:
    """Mark a function as a CPU kernel. Nothing is compiled yet."""
    return Kernel(function)


def missing_features(*dtypes: torch.dtype | None) -> tuple[str, ...]:
    """Why this process cannot run CPU kernels on these dtypes; empty when it can."""
    reasons = []
    if _config.DISABLE_JIT:
        reasons.append("Numba's compiler is turned off by NUMBA_DISABLE_JIT")
    if (torch.float16 in dtypes or torch.float8_e4m3fn in dtypes) and not _converts_float16():
        reasons.append("this CPU has no instructions for float16 (F16C), through which float8 is read too")
    return tuple(reasons)


def _converts_float16() -> bool:
    features = binding.get_host_cpu_features()
    # Other architectures that Numba compiles for convert float16 in their base instruction set.
    return not binding.get_process_triple().startswith("x86_64") or bool(features.get("f16c"))


def streams(t: torch.Tensor, stride: int) -> bool:
    """Whether an output with this row stride is stored past the caches: it is large, and every row is aligned."""
    size = t.element_size()
    return t.numel() * size >= _STREAMING_BYTES and not (t.data_ptr() | stride * size) & 63
