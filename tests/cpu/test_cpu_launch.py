"""What CPU kernels stand on: conversions, exp and activations, threads, fork, the cache between processes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import onepass
from onepass.errors import CacheNotWritableWarning
from onepass.launch import cpu, cpu_cache, cpu_math, cpu_threads
from onepass.launch.cpu_memory import load_first, load_pair, store_first, store_pair, take

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cpu.kernel
def convert_kernel(x: Any, y: Any, n: int, num_rows: int, chunk: int, counter: int) -> None:
    take(counter, chunk)
    pairs = n & ~31
    for i in range(0, pairs, 32):
        a, b = load_pair(x, i, y)
        store_pair(y, i, a, b, False)
    for i in range(pairs, n, 16):
        store_first(y, i, load_first(x, i, n - i), n - i)


@cpu.kernel
def activate_kernel(activation: Any, x: Any, y: Any, n: int, num_rows: int, chunk: int, counter: int) -> None:
    take(counter, chunk)
    for i in range(0, n, 16):
        store_first(y, i, cpu_math.activate(activation, y, load_first(x, i, n - i)), n - i)


@cpu.kernel
def exp_minus_kernel(x: Any, y: Any, n: int, num_rows: int, chunk: int, counter: int) -> None:
    take(counter, chunk)
    for i in range(0, n, 16):
        store_first(y, i, cpu_math.exp_minus_for(y, load_first(x, i, n - i)), n - i)


def call(kernel: cpu.Kernel, x: torch.Tensor, y: torch.Tensor, *first: Any) -> torch.Tensor:
    compiled = kernel.compiled(*first, cpu.pointer(x.dtype), cpu.pointer(y.dtype), *(int,) * 4)
    cpu.run_rows(compiled, (*(None for _ in first), x.data_ptr(), y.data_ptr(), x.numel()), 1, x.numel())
    return y


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def hard_float32() -> torch.Tensor:
    """Values at, just below and just above every rounding boundary of both half types, and random bits."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    near_ties = [(every << 16) + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    half = every.to(torch.int16).view(torch.float16).float()
    half = half[half.isfinite()].view(torch.int32)
    near_half_ties = [half + offset for offset in (0, 1, -1, 0xFFF, 0x1000, 0x1001)]
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31 - 1, (200_003,), dtype=torch.int32, generator=generator)
    return torch.cat([*near_ties, *near_half_ties, random]).view(torch.float32)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_conversions_are_those_of_torch(source: torch.dtype, to: torch.dtype) -> None:
    x = hard_float32()
    if source != torch.float32:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    got = call(convert_kernel, x, torch.empty(x.shape, dtype=to))
    assert same(got, x.to(to))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 63])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_and_unaligned_addresses_touch_nothing_else(dtype: torch.dtype, n: int) -> None:
    x = torch.arange(n + 2).to(dtype)[1:-1]
    y = torch.full((n + 4,), 99.0, dtype=dtype)
    call(convert_kernel, x, y[1 : n + 1])
    assert torch.equal(y[1 : n + 1], x)
    assert (y[:1] == 99).all()
    assert (y[n + 1 :] == 99).all()


def ulps(got: torch.Tensor, want: np.ndarray) -> np.ndarray:
    """The error of float32 results against float64, in units in the last place of the float32 nearest to it."""
    spacing = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    return np.abs(got.numpy().astype(np.float64) - want) / spacing


def test_exp_is_within_2_ulp() -> None:
    x = torch.linspace(-88.7, 86.9, 2_000_003)
    x = torch.cat([x, torch.linspace(-1e-3, 1e-3, 10_001)])
    got = call(exp_minus_kernel, x, torch.empty_like(x))
    assert ulps(got, np.exp(-x.double().numpy())).max() <= 2.0


def test_exp_at_its_ends() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, 1e30, 88.0, -0.0, 0.0, -88.75, -1e30, -inf, nan])
    got = call(exp_minus_kernel, x, torch.empty_like(x))
    assert torch.equal(got[:-1], torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, inf, inf, inf]))
    assert got[-1].isnan()


EAGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.special.expit(x),
    "gelu": lambda x: x * torch.special.erfc(-x / 2**0.5) / 2,
    # (1 + tanh u) / 2 as the logistic function of 2u: in float64 the tanh itself loses the tail.
    "gelu_tanh": lambda x: x * torch.special.expit((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_accurate_to_float32_also_where_they_are_small(name: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 1_000_003), torch.logspace(-30, 0, 1001), -torch.logspace(-30, 0, 1001)])
    want = ACTIVATIONS[name](x.double()).numpy()
    got = call(activate_kernel, x, torch.empty_like(x), cpu.choice(name))
    error = ulps(got, want)
    assert error[(x >= -1).numpy()].max() <= 4.0
    # The tail is e^-logit, so the logit's own rounding shows in it: about |logit| · 2^-24 of relative error.
    tail = ((x < -1) & (x >= -5.5)).numpy()
    assert (np.abs(got.numpy() - want)[tail] / np.abs(want[tail])).max() <= 4e-6
    # Below, what is left of gelu is smaller than a float32 step at 1, and eager gives 0 or a step.
    assert np.abs(got.numpy() - want)[(x < -5.5).numpy()].max() <= 2e-7 if name != "silu" else 1e-8
    eager = EAGER[name](x)
    assert np.abs(got.numpy() - want).max() <= 2 * np.abs(eager.numpy() - want).max()


@pytest.mark.parametrize("name", [*ACTIVATIONS, "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_special_values(name: str, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -3e38, -6e4, -1e3, -89.0, -20.0, -0.0, 0.0, 20.0, 89.0, 1e3, 6e4, 3e38, inf, nan]).to(dtype)
    got = call(activate_kernel, x, torch.empty_like(x), cpu.choice(name))
    # In float64: torch's float32 gelu gives NaN for infinity.
    want = EAGER[name](x.double()).to(dtype)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)


# In a process with an empty cache: the code of a kernel that came from disk cannot be read.
READ_ASSEMBLY = """
import torch, onepass
from onepass.ops.layer_norm.kernel_cpu import layer_norm_kernel
onepass.layer_norm(torch.ones(2, 64), activation="gelu")
assembly = "\\n".join(layer_norm_kernel.assembly())
assert "vfmadd" in assembly
assert "%zmm" in assembly or "%ymm" in assembly
assert "expf" not in assembly
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
def test_kernels_are_vector_code_without_calls(tmp_path: Path) -> None:
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", READ_ASSEMBLY]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads for every call, however small."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(cpu_threads, "PARALLEL_ELEMENTS", 0)
    yield
    torch.set_num_threads(before)


def taking(seen: list[tuple[str, int, int]], fails_on: str = "") -> Any:
    """A stand-in for a kernel that notes who took which rows."""
    lock = threading.Lock()
    together = threading.Barrier(2, timeout=20)

    def kernel(num_rows: int, chunk: int, counter: int) -> None:
        name = threading.current_thread().name
        together.wait()
        if fails_on and name.startswith(fails_on):
            raise ArithmeticError(name)
        while True:
            with lock:
                cell = ctypes.c_int64.from_address(counter)
                first, cell.value = cell.value, cell.value + chunk
            if first >= num_rows:
                return
            seen.append((name, first, min(first + chunk, num_rows)))

    return kernel


@pytest.fixture
def two_threads(three_threads: None) -> None:
    torch.set_num_threads(2)


def test_rows_are_each_taken_once(two_threads: None) -> None:
    seen: list[tuple[str, int, int]] = []
    cpu.run_rows(taking(seen), (), 1001, 1000)
    rows = [row for _, first, last in seen for row in range(first, last)]
    assert sorted(rows) == list(range(1001))


@pytest.mark.parametrize("fails_on", ["onepass", "MainThread"])
def test_an_exception_in_any_thread_reaches_the_caller(two_threads: None, fails_on: str) -> None:
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ArithmeticError, match=fails_on):
        cpu.run_rows(taking(seen, fails_on), (), 1001, 1000)


def test_a_small_call_stays_on_its_thread() -> None:
    names = []
    cpu.run_rows(lambda *args: names.append(threading.current_thread().name), (), 4, 1024)
    assert names == [threading.current_thread().name]


def test_a_pool_at_work_does_not_hold_up_another_call(two_threads: None) -> None:
    release = threading.Event()
    cpu_threads._pool.submit(1, release.wait, (20,))
    x = torch.randn(1000)
    try:
        assert torch.equal(call(convert_kernel, x, torch.empty_like(x)), x)
        done: list[int] = []
        cpu.run_rows(lambda *args: done.append(1), (), 100, 1000)
        assert done == [1]
    finally:
        release.set()


def test_calls_from_many_threads(three_threads: None) -> None:
    x = torch.randn(300, 512)

    def sum_of_relu(_: int) -> torch.Tensor:
        with onepass.backend("cpu"):
            return onepass.add_relu(x, x)

    want = sum_of_relu(0)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(sum_of_relu, range(64)))
    assert all(torch.equal(got, want) for got in results)


USE_CHILD = """
import os, sys, torch
torch.set_num_threads(3)
import onepass
x = torch.randn(2048, 256)
want = onepass.layer_norm(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(onepass.layer_norm(x), want) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(onepass.layer_norm(x), want)
"""

USE_CACHE = """
import sys, torch, onepass
from onepass.ops.layer_norm import kernel_cpu
x = torch.ones(3, 40); x[:, ::3] = 2
print(onepass.layer_norm(x).sum().item(), kernel_cpu.layer_norm_kernel.cache_hits)
"""


def process(code: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), "ONEPASS_BACKEND": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(running: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    return out, err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_works_in_the_child_of_a_fork(tmp_path: Path) -> None:
    output(process(USE_CHILD, tmp_path))


def test_processes_that_compile_at_once_leave_a_cache_that_later_ones_use(tmp_path: Path) -> None:
    together = [output(p)[0].split() for p in [process(USE_CACHE, tmp_path) for _ in range(2)]]
    later, hits = output(process(USE_CACHE, tmp_path))[0].split()
    assert {result for result, _ in together} == {later}
    assert hits == "1"


def copy_kernel(x: Any, y: Any, n: int, num_rows: int, chunk: int, counter: int) -> None:
    store_first(y, 0, load_first(x, 0, n), n)


def test_a_damaged_file_of_the_cache_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_cache, "cache_folder", lambda name: tmp_path)
    x = torch.arange(5.0)
    hits = []
    for damage in (False, False, True):
        for file in tmp_path.iterdir() if damage else ():
            file.write_bytes(file.read_bytes()[:-100])
        kernel = cpu.kernel(copy_kernel)
        assert torch.equal(call(kernel, x, torch.empty_like(x)), x)
        hits.append(kernel.cache_hits)
    assert hits == [0, 1, 0]


def test_a_cache_folder_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    _, err = output(process(USE_CACHE, folder))
    assert err.count(CacheNotWritableWarning.__name__) == 1
    assert str(folder / "numba") in err


def test_a_changed_helper_is_another_kernel(tmp_path: Path) -> None:
    source = tmp_path / "helper.py"
    source.write_text("a = 1")
    before = cpu_cache._digest((str(source),))
    source.write_text("a = 2")
    cpu_cache._digest.cache_clear()
    assert cpu_cache._digest((str(source),)) != before


def test_a_full_disk_warns_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_cache.tempfile, "mkstemp", no_space)
    monkeypatch.setattr(cpu_cache, "_digest", lambda sources: "a kernel that no cache has")

    x = torch.arange(5.0)
    with pytest.warns(CacheNotWritableWarning, match="No space left"):
        got = call(cpu.kernel(copy_kernel), x, torch.empty_like(x))
    assert torch.equal(got, x)


def test_reasons_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.missing_features(*DTYPES, None) == ()
    monkeypatch.setattr(cpu, "_converts_float16", lambda: False)
    assert "F16C" in cpu.missing_features(torch.float16)[0]
    assert cpu.missing_features(torch.float32, torch.bfloat16) == ()
    monkeypatch.setattr(cpu._config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in cpu.missing_features(torch.float32)[0]
