"""Which backend runs: the order, forcing one, and what explain() and errors say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import onepass
from onepass import dispatch
from onepass.errors import NoBackendError, UnknownNameError

ROOT = Path(__file__).resolve().parents[2]


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (4, 16), dtype=dtype)


def _backend() -> str | None:
    return onepass.explain("layer_norm", _x()).backend


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env, timeout=300
    )


def test_every_op_ends_with_the_reference() -> None:
    """The other backends come in the order of BACKENDS, and each has its module."""
    for op, backends in dispatch.TABLE.items():
        assert backends[-1] == "reference"
        assert list(backends) == [name for name in dispatch.BACKENDS if name in backends]
        for name in backends:
            assert dispatch._module(op, name).unsupported_reasons


def test_on_the_cpu_the_cpu_backend_runs() -> None:
    explanation = onepass.explain("layer_norm", _x(), activation="silu")
    assert explanation.op == "layer_norm"
    assert explanation.backend == "cpu"
    assert tuple(explanation.reasons) == dispatch.TABLE["layer_norm"]
    assert "the tensors are on 'cpu'" in explanation.reasons["triton"][0]
    assert explanation.reasons["cpu"] == ()
    assert explanation.reasons["reference"] == (dispatch.REFERENCE_REASON,)
    assert explanation.notes == ()
    text = str(explanation)
    assert text.startswith("layer_norm: runs on 'cpu'\n")
    assert "\n  cpu: can run it" in text


def test_explain_takes_the_public_functions() -> None:
    assert onepass.explain(onepass.layer_norm, _x()) == onepass.explain("layer_norm", _x())
    assert onepass.explain(onepass.layer_norm_silu, _x()).op == "layer_norm"
    assert onepass.explain(onepass.add_relu, _x(), _x()).backend == "cpu"


def test_explain_names_the_slower_paths() -> None:
    x = _x(16, 4).t()
    (note,) = onepass.explain("layer_norm", x).notes
    assert note == "'x' has no single row stride and is copied to or from contiguous memory"
    assert onepass.explain("layer_norm", _x(), weight=_x(32)[::2]).notes == (note.replace("'x'", "'weight'"),)
    assert onepass.explain("layer_norm", _x(), out=_x(16, 4).t()).notes == (note.replace("'x'", "'out'"),)
    assert onepass.explain("add_relu", x, _x()).notes == (note,)
    both = onepass.explain("layer_norm", x, residual=x)
    assert [n.split()[0] for n in both.notes] == ["'x'", "'residual'"]
    assert f"\n  note: {note}" in str(both)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("layer_norm", (torch.ones(65)[1:].view(4, 16),)),
        ("layer_norm", (torch.ones(4, 17)[:, :16],)),
        ("layer_norm", (torch.ones(4, 17),)),
        ("layer_norm", (torch.ones(4, 16), torch.ones(17)[1:])),
        ("layer_norm", (torch.ones(4, 20, dtype=torch.bfloat16)[:, :15],)),
        ("add_relu", (torch.ones(65)[1:].view(4, 16), torch.ones(4, 16))),
        ("add_relu", (torch.ones(4, 17)[:, :16], torch.ones(4, 16))),
        ("add_relu", (torch.ones(4, 20)[:, :15], torch.ones(4, 20)[:, :15])),
    ],
)
def test_explain_tells_of_unaligned_memory(op: str, arguments: tuple[torch.Tensor, ...]) -> None:
    """Also where only the fresh output, whose rows follow each other, is not aligned."""
    (note,) = onepass.explain(op, *arguments).notes
    assert note == "a pointer or a row stride is not a multiple of 16 bytes: narrower memory accesses"


def test_explain_raises_what_the_op_raises() -> None:
    with pytest.raises(TypeError, match=r"'x': expected .*, got torch\.int64"):
        onepass.explain("layer_norm", torch.ones(4, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="'y': expected the shape of x"):
        onepass.explain("add_relu", _x(), _x(1, 16))


def test_explain_runs_nothing() -> None:
    x = _x()
    out = torch.full_like(x, 7.0)
    onepass.explain("layer_norm", x, out=out)
    assert bool((out == 7).all())


def test_backend_forces_one_and_nests() -> None:
    assert dispatch.forced() is None
    with onepass.backend("reference"):
        assert _backend() == "reference"
        with onepass.backend("cpu"):
            assert _backend() == "cpu"
            assert onepass.explain("layer_norm", _x()).reasons["reference"] == ("the backend 'cpu' is forced",)
        assert _backend() == "reference"
    assert _backend() == "cpu"


def test_backend_ends_with_its_block_when_it_raises() -> None:
    with pytest.raises(KeyError), onepass.backend("reference"):
        raise KeyError
    assert dispatch.forced() is None


def test_forcing_holds_after_the_same_call_ran_elsewhere() -> None:
    """What is remembered of a call does not outlive a change of the backend."""
    x = _x(3, 5)
    onepass.layer_norm(x)
    with onepass.backend("triton"), pytest.raises(NoBackendError):
        onepass.layer_norm(x)
    onepass.layer_norm(x)


def test_a_forced_backend_is_its_threads_own() -> None:
    seen: list[str | None] = []
    with onepass.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(_backend()))
        thread.start()
        thread.join()
        assert _backend() == "reference"
    assert seen == ["cpu"]


@pytest.mark.parametrize("op", ["layer_norm", "add_relu"])
def test_no_backend_error_lists_every_reason(op: str) -> None:
    call = {"layer_norm": lambda: onepass.layer_norm(_x()), "add_relu": lambda: onepass.add_relu(_x(), _x())}[op]
    with onepass.backend("triton"), pytest.raises(NoBackendError) as caught:
        call()
    first, *lines = str(caught.value).splitlines()
    assert first == f"no backend of '{op}' can run this call:"
    for backend, line in zip(dispatch.TABLE[op], lines, strict=True):
        if backend == "triton":
            assert line.startswith("  triton: Triton runs on a GPU, and the tensors are on 'cpu'")
        else:
            assert line == f"  {backend}: the backend 'triton' is forced"
    with onepass.backend("triton"):
        explanation = onepass.explain("layer_norm", _x())
    assert explanation.backend is None
    assert str(explanation).startswith("layer_norm: no backend can run this call\n")


@pytest.mark.parametrize(("name", "nearest"), [("tritn", "triton"), ("Reference", "reference"), ("cpu0", "cpu")])
def test_an_unknown_backend_suggests_the_nearest(name: str, nearest: str) -> None:
    with (
        pytest.raises(UnknownNameError, match=f"unknown backend '{name}'. Did you mean '{nearest}'?"),
        onepass.backend(name),
    ):
        pass


def test_an_unknown_op_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown op 'layernorm'\. Did you mean 'layer_norm'\?"):
        onepass.explain("layernorm", _x())
    with pytest.raises(ValueError, match=r"unknown op 'softmin'\. Did you mean 'softmax'\?"):
        onepass.explain(torch.nn.functional.softmin, _x())
    with pytest.raises(UnknownNameError, match=r"unknown op 'zzz'\. Known: layer_norm, add_relu"):
        onepass.explain("zzz")


PRINT_BACKEND = "import torch, onepass; print(onepass.explain('layer_norm', torch.ones(2, 8)).backend)"


def test_the_environment_forces_a_backend() -> None:
    done = _run(
        PRINT_BACKEND + "\nwith onepass.backend('cpu'): print(onepass.explain('layer_norm', torch.ones(2, 8)).backend)",
        ONEPASS_BACKEND="reference",
    )
    assert done.stdout.split() == ["reference", "cpu"], done.stderr


def test_a_wrong_name_in_the_environment_is_an_error() -> None:
    done = _run("import torch, onepass; onepass.layer_norm(torch.ones(2, 8))", ONEPASS_BACKEND="refrence")
    assert done.returncode != 0
    assert "unknown backend in ONEPASS_BACKEND 'refrence'. Did you mean 'reference'?" in done.stderr


@pytest.mark.parametrize("package", ["triton", "numba"])
def test_a_missing_package_is_a_reason(package: str) -> None:
    """Triton is not made for every system: the other backends do without it."""
    done = _run(
        f"""
import sys
sys.modules['{package}'] = None
import torch, onepass
print(onepass.explain('layer_norm', torch.ones(2, 8)))
with onepass.backend('reference'): onepass.layer_norm(torch.ones(2, 8))
print(onepass.layer_norm(torch.ones(2, 8)).shape)
"""
    )
    assert f"it needs the package '{package}', which is not installed" in done.stdout, done.stderr
    assert done.returncode == (0 if package == "triton" else 1), done.stderr
    assert ("NoBackendError" in done.stderr) == (package == "numba")
