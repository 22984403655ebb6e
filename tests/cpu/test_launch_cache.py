"""Where compiled kernels are kept, what happens when they cannot be, and compiling from several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

# Compiles one Triton kernel for an explicit target, which needs no GPU.
PRELUDE = """
import os, threading, warnings
import torch, triton
from triton.backends.compiler import GPUTarget
from onepass.launch.triton import compile_kernel, features_of
from onepass.ops.add_relu import kernel_triton
from onepass.ops.add_relu.op import Desc

def compile(dtype, target=GPUTarget("cuda", 90, 32)):
    desc = Desc(torch.device("cuda", 0), dtype, 1, 4096, True, ())
    return compile_kernel(*kernel_triton.specialize(desc, features_of(target)), target)
"""


def _run(code: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ONEPASS_CACHE_DIR": str(cache)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_kernels_lie_in_our_folder_and_tritons_own_is_restored(tmp_path: Path) -> None:
    out = _run(
        """
before = triton.knobs.cache.dir
assert compile(torch.bfloat16).asm["cubin"]
assert triton.knobs.cache.dir == before, (before, triton.knobs.cache.dir)
print("ok")
""",
        tmp_path,
    )
    assert out == "ok\n"
    assert [path.name for path in tmp_path.iterdir()] == ["triton"]
    assert list((tmp_path / "triton").rglob("add_relu_kernel.cubin"))


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    code = """
from triton.compiler.compiler import ASTSource
if list(__import__("pathlib").Path(os.environ["ONEPASS_CACHE_DIR"]).rglob("*.cubin")):
    def refuse(*args, **kwargs): raise AssertionError("compiled again")
    ASTSource.make_ir = refuse
print(len(compile(torch.float16).asm["cubin"]))
"""
    assert _run(code, tmp_path) == _run(code, tmp_path)


def test_a_folder_that_cannot_be_written_is_told_once_and_does_no_harm(tmp_path: Path) -> None:
    """A folder under a regular file cannot be made, not even by root."""
    file = tmp_path / "file"
    file.write_text("")
    out = _run(
        """
import onepass
from onepass.errors import CacheNotWritableWarning
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compile(torch.bfloat16), compile(torch.float16)
    told = [w for w in caught if issubclass(w.category, CacheNotWritableWarning)]
    print(len(told), "ONEPASS_CACHE_DIR" in str(told[0].message))
    x = torch.randn(4, 64)
    assert torch.allclose(onepass.layer_norm(x), torch.nn.functional.layer_norm(x, (64,)), atol=1e-5)
    told = [w for w in caught if issubclass(w.category, CacheNotWritableWarning)]
    print(len(told) <= 2)
""",
        file / "cache",
    )
    assert out == "1 True\nTrue\n"
    assert list(tmp_path.iterdir()) == [file]


def test_threads_compile_at_the_same_time(tmp_path: Path) -> None:
    out = _run(
        """
results, errors = {}, []
barrier = threading.Barrier(6)
before = triton.knobs.cache.dir

def work(i):
    try:
        barrier.wait()
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        results[i] = compile(dtype).asm["cubin"]
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
assert all(results[i] == results[i + 3] for i in range(3))
assert len(set(results.values())) == 3
assert triton.knobs.cache.dir == before
print("ok")
""",
        tmp_path,
    )
    assert out == "ok\n"
