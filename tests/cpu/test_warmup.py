"""warmup: what it calls, that the next process compiles nothing, threads, a spawned process, and its errors."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import workers
from typer.testing import CliRunner

import onepass
from onepass import progress
from onepass.cli import app
from onepass.errors import UnknownNameError
from onepass.ops.layer_norm import op as layer_norm_op

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every call of layer_norm, which still runs."""
    seen: list[dict[str, Any]] = []
    find = layer_norm_op._plans.find

    def spy(values: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        names, fresh = ("x", "residual", "weight", "bias"), len(tensors) == 4
        arguments = dict(zip(names, tensors, strict=False)) | dict(zip(("eps", "activation"), values, strict=True))
        seen.append({**arguments, "fresh": fresh})
        return find(values, tensors)

    monkeypatch.setattr(layer_norm_op._plans, "find", spy)
    return seen


def test_each_shape_and_dtype_is_called_in_both_forms(calls: list[dict[str, Any]]) -> None:
    warmed = onepass.warmup("layer_norm", [(2, 64), (3, 4, 64)], device="cpu")
    assert [(w.op, w.backend, w.shape, w.dtype) for w in warmed] == [
        ("layer_norm", "cpu", (2, 64), torch.float32),
        ("layer_norm", "cpu", (2, 64), torch.bfloat16),
        ("layer_norm", "cpu", (3, 4, 64), torch.float32),
        ("layer_norm", "cpu", (3, 4, 64), torch.bfloat16),
    ]
    assert all(w.seconds > 0 for w in warmed)
    assert "layer_norm 2×64 float32: cpu, " in str(warmed[0])
    assert [c["fresh"] for c in calls] == [True, False] * 4
    assert all(c["weight"].dtype == c["bias"].dtype == c["x"].dtype for c in calls)
    assert all(c["activation"] is None and c["residual"] is None for c in calls), "not the op's own defaults"


def test_arguments_of_the_op(calls: list[dict[str, Any]]) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    arguments = {"activation": "gelu", "residual": torch.zeros_like, "weight": weight, "bias": None, "eps": 1e-3}
    onepass.warmup(onepass.layer_norm, [(2, 64)], dtypes=[torch.bfloat16], **arguments)
    for call in calls:
        assert (call["activation"], call["eps"], call["bias"]) == ("gelu", 1e-3, None)
        assert call["weight"] is weight
        assert call["residual"].shape == (2, 64)
        assert call["residual"].dtype == torch.bfloat16


def test_a_short_form_of_an_op(calls: list[dict[str, Any]]) -> None:
    (warmed,) = onepass.warmup(onepass.layer_norm_silu, [(2, 64)], dtypes=[torch.float32])
    assert warmed.op == "layer_norm"
    assert [c["activation"] for c in calls] == ["silu", "silu"]


def test_nothing_to_do() -> None:
    assert onepass.warmup("layer_norm", []) == []
    assert [w.shape for w in onepass.warmup("add_relu", [(0, 8)], dtypes=[torch.float16])] == [(0, 8)]


@pytest.mark.parametrize(
    ("arguments", "more", "error", "expected"),
    [
        (("layernorm", [(1, 8)]), {}, UnknownNameError, "Did you mean 'layer_norm'?"),
        (("layer_norm", [(1, 8)]), {"activaton": "silu"}, UnknownNameError, "Did you mean 'activation'?"),
        (("layer_norm", [(1, 8)]), {"activation": "swish"}, ValueError, "one of None, 'silu'"),
        (("layer_norm", (1, 8)), {}, TypeError, r"a list of shapes, such as \[\(1, 4096\)\], got \(1, 8\)"),
        (("layer_norm", [(1, 8.5)]), {}, TypeError, "a list of shapes"),
        (("layer_norm", ["1x8"]), {}, TypeError, "a list of shapes"),
        (("layer_norm", [()]), {}, ValueError, "a list of shapes"),
        (("layer_norm", [(-1, 8)]), {}, ValueError, r"got \(-1, 8\)"),
        (("layer_norm", [(1, 8)]), {"dtypes": [torch.int8]}, TypeError, "torch.float16, got torch.int8"),
        (("layer_norm", [(1, 8)]), {"dtypes": torch.float32}, TypeError, "a list of dtypes"),
        (("layer_norm", [(1, 8)]), {"dtypes": ["bf16"]}, TypeError, "got 'bf16'"),
        (("layer_norm", [(1, 8)]), {"device": "tpu"}, ValueError, "a device that torch can use here, got 'tpu'"),
        (("layer_norm", [(1, 8)]), {"device": "cuda:99"}, ValueError, "got 'cuda:99'"),
    ],
)
def test_errors(arguments: tuple[Any, ...], more: dict[str, Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        onepass.warmup(*arguments, **more)


WARM = """
import sys, onepass, torch
onepass.warmup("layer_norm", [(1, 72), (600, 72)], device="cpu", dtypes=[torch.bfloat16], activation="relu")
"""
CALL = """
x = torch.ones(5, 72, dtype=torch.bfloat16)
w, b = x[0] * 2, x[0] * 3
onepass.layer_norm(x, w, b, activation="relu")
onepass.layer_norm(x, w, b, activation="relu", out=x)
"""


def _run(code: str, cache: Path) -> set[Path]:
    """Files of the cache folder after a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONEPASS_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == "", "a bar, or another word, in a pipe"
    return {path for path in cache.rglob("*") if path.is_file()}


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    files = _run(WARM, tmp_path)
    assert files
    modified = {path: path.stat().st_mtime_ns for path in files}
    assert _run("import onepass, torch\n" + CALL, tmp_path) == files
    assert {path: path.stat().st_mtime_ns for path in files} == modified


def test_a_call_after_warmup_compiles_nothing(tmp_path: Path) -> None:
    """In the same process: the calls leave no file that warmup did not leave, though the folder was emptied."""
    empty = "import shutil, os; shutil.rmtree(os.environ['ONEPASS_CACHE_DIR'] + '/numba')"
    assert _run(WARM + empty + CALL, tmp_path) == set()


def test_threads() -> None:
    results: list[list[Any]] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        results.append(onepass.warmup("layer_norm", [(3, 80)], device="cpu", dtypes=[torch.float32], activation="relu"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[w.shape for w in result] for result in results] == [[(3, 80)]] * 4


def test_a_spawned_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(workers.warm, ((2, 576),)) == ["cpu"]


def test_progress_is_told_each_step() -> None:
    steps: list[str] = []
    onepass.warmup("layer_norm", [(1, 64), (2, 64)], dtypes=[torch.float32], device="cpu", progress=steps.append)
    assert steps == ["layer_norm 1×64 float32", "layer_norm 2×64 float32"]


class _Terminal:
    """As much of a terminal as the bar asks for."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize(("after_seconds", "draws"), [(0.0, True), (60.0, False)])
def test_the_bar_waits(after_seconds: float, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar(after_seconds=after_seconds) as (advance, set_total):
        set_total(2)
        advance("first")
        advance("second")
    assert ("first" in terminal.text, "second" in terminal.text) == (draws, draws)
    assert bool(terminal.text) == draws


def _warm(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["warmup", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_on_the_command_line(calls: list[dict[str, Any]]) -> None:
    more = ("--with", "activation=relu", "--with", "bias=none", "--with", "eps=1e-3", "--residual")
    code, said = _warm("layer_norm", "--shape", "2x64", "--dtype", "bf16", "--device", "cpu", *more)
    assert code == 0, said
    assert "layer_norm 2×64 bfloat16: cpu, " in said
    assert (calls[0]["activation"], calls[0]["bias"], calls[0]["eps"]) == ("relu", None, 1e-3)
    assert calls[0]["residual"] is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("layernorm", "--shape", "1x8"), "Did you mean 'layer_norm'?"),
        (("layer_norm", "--shape", "1,8"), "expected sizes as in 1x4096, got 1,8"),
        (("layer_norm", "--shape", "1x8", "--with", "activation"), "expected NAME=VALUE"),
    ],
)
def test_errors_on_the_command_line(arguments: Sequence[str], expected: str) -> None:
    code, said = _warm(*arguments)
    assert code == 2
    assert expected in said
