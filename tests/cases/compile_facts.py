"""Compiles a Triton kernel for a target that need not be present, and reads what the compiler made of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cases import BF16, FP16, FP32

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


class Job(NamedTuple):
    """One call of an op, and the target its kernel is compiled for: 90 (sm_90) or "gfx942"."""

    op: str
    arch: int | str
    n: int
    dtype: str
    residual: bool = False
    weight: str | None = None
    num_rows: int = 100
    aligned: bool = True

    def __str__(self) -> str:
        target = self.arch if isinstance(self.arch, str) else f"sm_{self.arch}"
        parts = [self.op, target, str(self.n), self.dtype, f"{self.num_rows}-rows"]
        parts += ["residual"] * self.residual + ["unaligned"] * (not self.aligned)
        return "-".join([*parts, f"weight-{self.weight}"] if self.weight else parts)


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
    compiled = compile_kernel(*_specialize(job, features_of(target)), target)
    if target.backend == "hip":
        return _amd_facts(compiled.asm["amdgcn"], compiled.metadata.shared)
    return nvidia_facts(compiled.asm["cubin"], compiled.metadata.shared)


def _specialize(job: Job, features: Any) -> tuple[Any, Any]:
    device, dtype = torch.device("cuda", 0), DTYPES[job.dtype]
    if job.op == "add_relu":
        from onepass.ops.add_relu import kernel_triton as add_relu
        from onepass.ops.add_relu.op import Desc as AddReluDesc

        return add_relu.specialize(AddReluDesc(device, dtype, job.num_rows, job.n, job.aligned, ()), features)
    from onepass.ops.layer_norm import config
    from onepass.ops.layer_norm import kernel_triton as layer_norm
    from onepass.ops.layer_norm.op import Desc

    weight = DTYPES[job.weight] if job.weight else dtype
    desc = Desc(device, dtype, weight, weight, job.num_rows, job.n, "silu", job.residual, job.aligned, ())
    return layer_norm.specialize(desc, config.heuristic(job.n, dtype.itemsize), features)


def nvidia_facts(cubin: bytes, shared: int) -> Facts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, static, local = map(int, found.groups())
    opcodes = re.findall(r"\b(?:LDG|STG|LDGSTS)\.[.\w]*", sass)
    return Facts(registers, stack + local, shared + static, tuple(sorted(set(opcodes))))


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
