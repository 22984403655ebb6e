"""Every Triton kernel, as its default config shapes it, compiled for every architecture; no GPU is needed.

Spills, shared memory past what a block may have, and narrow memory accesses are errors here, before anyone measures.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from cases.compile_facts import Facts, Job, facts

triton = pytest.importorskip("triton", reason="Triton is not installed")

# Shared memory that a block may have, in bytes.
SHARED_LIMITS: dict[int | str, int] = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
    "gfx942": 64 << 10,
}
SIZES = (17, 576, 768, 4096, 14336, 16384, 65536, 100003)
MANY_ROWS = 1 << 20


def _jobs() -> Iterator[Job]:
    for n in SIZES:
        for dtype in ("bf16", "fp32"):
            for residual in (False, True):
                yield Job("layer_norm", 90, n, dtype, residual)
        yield Job("layer_norm", 90, n, "bf16", True, num_rows=MANY_ROWS)
    for arch in SHARED_LIMITS:
        if arch != 90:
            for n in SIZES:
                yield Job("layer_norm", arch, n, "bf16", True)
            for n in (4096, 16384, 65536, 100003):
                yield Job("layer_norm", arch, n, "fp32", True)
        yield Job("add_relu", arch, 1 << 20, "bf16")
    for n in (768, 65536):
        yield Job("layer_norm", 90, n, "fp16", True)
        yield Job("layer_norm", 90, n, "fp16", weight="fp32")
        yield Job("layer_norm", 90, n, "fp32", weight="bf16")
    for n in (17, 768, 4096, 65536):
        yield Job("layer_norm", 90, n, "bf16", True, aligned=False)
    yield Job("layer_norm", 80, 4096, "bf16", True, aligned=False)
    for dtype in ("fp16", "fp32"):
        yield Job("add_relu", 90, 1 << 20, dtype)
    yield Job("add_relu", 90, 4096, "bf16", num_rows=7)
    yield Job("add_relu", 90, 4096, "bf16", num_rows=7, aligned=False)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[Facts]]]:
    """Compiles the jobs of the selected tests on all cores."""
    chosen = [
        item.callspec.params["job"] for item in request.session.items if "compiled" in getattr(item, "fixturenames", ())
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield {job: pool.submit(facts, job) for job in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", [*_jobs()], ids=str)
def test_kernel(job: Job, compiled: dict[Job, Future[Facts]]) -> None:
    found = compiled[job].result()
    assert found.spilled_bytes <= _spill_limit(job), found
    assert found.shared_bytes <= SHARED_LIMITS[job.arch], found
    loads, stores = _widths(found, "load|LDG"), _widths(found, "store|STG")
    element_bytes = 4 if job.dtype == "fp32" else 2
    if not job.aligned:
        # A pointer may stand at any element: one element an access, or it would fault.
        assert loads | stores == {element_bytes}, found
    elif job.n % 16 == 0:
        # On AMD a thread of the widest block has 8 bytes of it.
        wide = 8 if job.arch == "gfx942" else 16
        assert max(loads) >= wide, found
        assert max(stores) >= wide, found


def _spill_limit(job: Job) -> int:
    """None; but the ptxas that Triton 3.6 brings for Blackwell keeps up to four registers in memory of its own accord,
    without having run out of them."""
    old_compiler = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return 16 if old_compiler and isinstance(job.arch, int) and job.arch >= 100 else 0


def _widths(found: Facts, kind: str) -> set[int]:
    """Bytes an access, for loads or stores."""
    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2}
    widths |= {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1}
    opcodes = [opcode for opcode in found.memory_opcodes if re.search(kind, opcode)]
    names = [next((part for part in re.split(r"[._]", opcode) if part in widths), None) for opcode in opcodes]
    return {4 if name is None else widths[name] for name in names}
