"""How kernels are launched on a GPU: graphs, streams, threads, devices, processes; no allocation, no waiting."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import BF16, FP16, layer_norm, normal, workers
from cases.checks import assert_same_bits
from torch import Tensor

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]


def _norm(x: Tensor, **more: object) -> Tensor:
    y = onepass.layer_norm(x, **more)  # type: ignore[arg-type]
    assert isinstance(y, Tensor)
    return y


# N16: nothing was compiled, loaded or allocated before the capture begins.
FIRST_CALL_IN_CAPTURE = """
import torch, onepass
long = torch.randn(5, 32768, device="cuda", dtype=torch.bfloat16)  # on sm_90 a CUDA kernel
x, r = (torch.randn(5, 640, device="cuda", dtype=torch.bfloat16) for _ in range(2))
w = torch.randn(640, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y, total = onepass.layer_norm(x, w, residual=r, activation="gelu")
    z = onepass.add_relu(y, total)
    long_y = onepass.layer_norm(long, activation="silu")
for seed in range(3):
    torch.manual_seed(seed)
    x.normal_(), r.normal_(), long.normal_()
    graph.replay()
    y2, total2 = onepass.layer_norm(x, w, residual=r, activation="gelu")
    assert torch.equal(y, y2) and torch.equal(total, total2) and torch.equal(z, torch.relu(y + total))
    assert torch.equal(total, x + r)
    assert torch.equal(long_y, onepass.layer_norm(long, activation="silu"))
    truth = torch.nn.functional.gelu(torch.nn.functional.layer_norm(total.double(), (640,), w.double()))
    torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=1e-5)
print("replayed")
"""


def test_the_first_call_of_a_process_may_be_captured(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ONEPASS_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL_IN_CAPTURE],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed" in done.stdout


def test_a_new_kernel_may_be_captured() -> None:
    """No other test uses this N: it is compiled and loaded inside the capture, next to work of other libraries."""
    x = normal(CUDA, 7, 1234, dtype=FP16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _norm(x * 2, activation="relu")
    for seed in (1, 2):
        x.copy_(normal(CUDA, 7, 1234, dtype=FP16, seed=seed))
        graph.replay()
        assert_same_bits((y,), (_norm(x * 2, activation="relu"),), "replay")


def test_captured_outputs_and_in_place() -> None:
    x, residual = normal(CUDA, 16, 576, dtype=BF16), normal(CUDA, 16, 576, dtype=BF16, seed=1)
    out = torch.empty_like(x)
    expected = onepass.layer_norm(x, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        onepass.layer_norm(x, residual=residual, out=out, residual_out=residual)
    original = residual.clone()
    for _ in range(2):
        residual.copy_(original)
        graph.replay()
        assert_same_bits((out, residual), tuple(expected), "replay")


def _allocations() -> int:
    return torch.cuda.memory_stats(CUDA)["allocation.all.allocated"]


def _calls_with_outputs() -> list[Callable[[], object]]:
    x, residual = normal(CUDA, 16, 576, dtype=BF16), normal(CUDA, 16, 576, dtype=BF16, seed=1)
    strided = normal(CUDA, 16, 1152, dtype=BF16)[:, :576]
    weight, bias = layer_norm.params(CUDA, 576, BF16, BF16).values()
    out, total = torch.empty_like(x), torch.empty_like(x)
    long, long_out = normal(CUDA, 5, 32768, dtype=BF16), torch.empty(5, 32768, dtype=BF16, device=CUDA)
    return [
        lambda: onepass.layer_norm(long, activation="silu", out=long_out),
        lambda: onepass.layer_norm(x, weight, bias, activation="silu", out=out),
        lambda: onepass.layer_norm(strided, weight, bias, out=strided),
        lambda: onepass.layer_norm(x, residual=residual, out=out, residual_out=total),
        lambda: onepass.add_relu(x, residual, out=out),
        lambda: onepass.add_relu(strided, residual, out=out),
    ]


def test_a_call_with_outputs_allocates_nothing() -> None:
    for call in _calls_with_outputs():
        call()
        before = _allocations()
        call()
        assert _allocations() == before


def test_nothing_waits_for_the_gpu() -> None:
    """Torch's own synchronisations are errors; and a long wait on the GPU does not hold up the calls."""
    calls = _calls_with_outputs()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(int(2e8))  # about a tenth of a second
        for call in calls:
            call()
        assert not torch.cuda.current_stream().query(), "the calls waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_the_current_stream_is_used() -> None:
    """Each stream first waits a while and then fills x: a kernel on another stream would read zeros."""
    expected = _norm(normal(CUDA, 64, 576, dtype=BF16))
    torch.cuda.synchronize()
    results = []
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        with torch.cuda.stream(stream):
            x = torch.zeros(64, 576, dtype=BF16, device=CUDA)
            values = normal(CUDA, 64, 576, dtype=BF16)
            torch.cuda._sleep(int(2e7))
            x.copy_(values)
            results.append(_norm(x))
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits((result,), (expected,), "on a stream")


def test_threads() -> None:
    """Eight threads start with the same four kernels, none of them compiled yet."""
    sizes = (1300, 1301, 40000, 40001)
    barrier = threading.Barrier(8)
    results: list[list[Tensor]] = [[] for _ in range(8)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            barrier.wait()
            with torch.cuda.stream(stream):
                for _ in range(10):
                    ys = [_norm(normal(CUDA, 3, n, dtype=BF16, seed=index), activation="silu") for n in sizes]
                results[index] = ys
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for index, ys in enumerate(results):
        expected = [_norm(normal(CUDA, 3, n, dtype=BF16, seed=index), activation="silu") for n in sizes]
        assert_same_bits(tuple(ys), tuple(expected), f"thread {index}")


def test_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(workers.norm_on, ("cuda:0",)) == workers.norm_on("cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensor_counts() -> None:
    """Not the current device, in both directions, with kernels that each device sees for the first time."""
    other = torch.device("cuda", 1)
    for current, device in ((CUDA, other), (other, CUDA)):
        with torch.cuda.device(current):
            x, residual = normal(device, 5, 1402, dtype=BF16), normal(device, 5, 1402, dtype=BF16, seed=1)
            y, total = onepass.layer_norm(x, residual=residual)
            z = onepass.add_relu(x, residual)
            long = normal(device, 3, 40008, dtype=BF16)
            long_y = _norm(long)
            assert torch.cuda.current_device() == current.index
        assert y.device == total.device == z.device == device
        assert torch.equal(total, x + residual)
        assert torch.equal(z, torch.relu(x + residual))
        truth = torch.nn.functional.layer_norm(total.double(), (1402,))
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=1e-5)
        truth = torch.nn.functional.layer_norm(long.double(), (40008,))
        torch.testing.assert_close(long_y.double(), truth, rtol=2**-8, atol=1e-5)


def test_on_the_gpu_triton_runs() -> None:
    explanation = onepass.explain(onepass.layer_norm, normal(CUDA, 4, 576, dtype=BF16))
    assert explanation.backend == "triton"
    assert "on 'cuda', not on 'cpu'" in str(explanation)
    with onepass.backend("cpu"), pytest.raises(RuntimeError, match="tensors are on 'cuda', not on 'cpu'"):
        onepass.layer_norm(normal(CUDA, 4, 576, dtype=BF16))
