"""Compiles a Triton kernel for a target that need not be present, and reads what the compiler made of it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ARCHS: tuple[int | str, ...] = (80, 86, 89, 90, 100, 120, "gfx942")


@dataclass(frozen=True)
class Compiled:
    """A Triton kernel as an op's default config shapes it.

    `specialize(features)` gives the kernel and its Specialization. `wide`: some load and some store take 16 bytes.
    `narrow`: the bytes of every access to global memory, for pointers that may be misaligned.
    """

    specialize: Callable[[Any], tuple[Any, Any]]
    archs: tuple[int | str, ...] = ARCHS
    wide: bool = True
    narrow: int | None = None


class Job(NamedTuple):
    """An entry of `COMPILED` in `cases.<op>`, and the target it is compiled for: 90 (sm_90) or "gfx942"."""

    op: str
    name: str
    arch: int | str

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.arch if isinstance(self.arch, str) else f'sm_{self.arch}'}"


class Facts(NamedTuple):
    """What one block of the kernel takes, and the opcodes with which it reads and writes global memory."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    memory_opcodes: tuple[str, ...]


def facts(job: Job) -> Facts:
    from triton.backends.compiler import GPUTarget

    from onepass.launch.triton import compile_kernel, features_of

    target = GPUTarget("hip", job.arch, 64) if isinstance(job.arch, str) else GPUTarget("cuda", job.arch, 32)
    entry = importlib.import_module(f"cases.{job.op}").COMPILED[job.name]
    compiled = compile_kernel(*entry.specialize(features_of(target)), target)
    if target.backend == "hip":
        return _amd_facts(compiled.asm["amdgcn"], compiled.metadata.shared)
    return nvidia_facts(compiled.asm["cubin"], compiled.metadata.shared)


def nvidia_facts(cubin: bytes, shared: int) -> Facts:
    usage, code = _dump(cubin, "--dump-resource-usage"), sass(cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, static, local = map(int, found.groups())
    opcodes = re.findall(r"\b(?:LDG|STG|LDGSTS)\.[.\w]*", code)
    return Facts(registers, stack + local, shared + static, tuple(sorted(set(opcodes))))


def sass(cubin: bytes) -> str:
    """A cubin's machine code as text."""
    return _dump(cubin, "-sass")


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _cuobjdump(option, file.name)


def _amd_facts(assembly: str, shared: int) -> Facts:
    (registers,) = re.findall(r"\.vgpr_count: +(\d+)", assembly)
    (private,) = re.findall(r"\.private_segment_fixed_size: +(\d+)", assembly)
    opcodes = re.findall(r"\b(?:global|buffer)_(?:load|store)_\w+", assembly)
    return Facts(int(registers), int(private), shared, tuple(sorted(set(opcodes))))


def _cuobjdump(option: str, file: str) -> str:
    folder = _tools()
    return subprocess.run(
        [folder / "cuobjdump", option, file],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"},
    ).stdout


@cache
def _tools() -> Path:
    """The folder of cuobjdump and nvdisasm in Triton's own package; some installers leave them without the x bit."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if all(os.access(folder / tool, os.X_OK) for tool in ("cuobjdump", "nvdisasm")):
        return folder
    executable = Path(tempfile.mkdtemp(prefix="onepass-tools-"))
    for tool in ("cuobjdump", "nvdisasm"):
        shutil.copy(folder / tool, executable / tool)
        (executable / tool).chmod(0o755)
    return executable
