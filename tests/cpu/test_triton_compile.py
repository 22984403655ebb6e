"""Every Triton kernel, as its default config shapes it, compiled for every architecture; no GPU is needed.

Spills, shared memory past what a block may have, and narrow memory accesses are errors here, before anyone measures.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from cases.compile_facts import Facts, Job, facts

from onepass.dispatch import TABLE

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


def _jobs() -> Iterator[Job]:
    for op in (op for op, backends in TABLE.items() if "triton" in backends):
        for name, entry in importlib.import_module(f"cases.{op}").COMPILED.items():
            yield from (Job(op, name, arch) for arch in entry.archs)


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
    entry = importlib.import_module(f"cases.{job.op}").COMPILED[job.name]
    loads, stores = _widths(found, "load|LDG"), _widths(found, "store|STG")
    if entry.narrow is not None:
        # A pointer may stand at any element: one element an access, or it would fault.
        assert loads | stores == {entry.narrow}, found
    elif entry.wide:
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
