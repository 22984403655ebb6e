"""What a user of the package meets before the first call: import, wheel, pinned versions."""

from __future__ import annotations

import pickle
import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import onepass

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

MAX_IMPORT_SECONDS = 0.15


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_import_adds_little_to_importing_torch() -> None:
    code = (
        "import time, torch; start = time.perf_counter(); import onepass; "
        "assert callable(onepass.layer_norm); print(time.perf_counter() - start)"
    )
    seconds = [float(python(code)) for _ in range(5)]
    assert statistics.median(seconds) <= MAX_IMPORT_SECONDS, seconds


def test_import_touches_no_gpu_and_loads_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import onepass; "
        "print(torch.cuda.is_initialized(), *sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    initialized, *added = python(code).split()
    assert initialized == "False"
    heavy = {"triton", "numba", "llvmlite", "cuda", "matplotlib", "rich", "typer", "transformers", "gguf"}
    assert heavy & set(added) == set()


def test_every_public_name_exists_and_is_documented() -> None:
    for name in onepass.__all__:
        assert getattr(onepass, name).__doc__, name
        assert name in dir(onepass)


def test_names_that_load_on_first_use() -> None:
    """One at a time in a process of its own, so that each is the first."""
    uses = {
        "an attribute": "import onepass; f = onepass.layer_norm",
        "from": "from onepass import layer_norm as f",
        "star": "from onepass import *; f = layer_norm",
        "the module first": "import onepass.ops.layer_norm.op, onepass; f = onepass.layer_norm",
        "pickled": "import pickle; f = pickle.loads(b'conepass.ops.layer_norm.op\\nlayer_norm\\n.')",
    }
    for name, code in uses.items():
        assert python(f"{code}; print(f.__name__)") == "layer_norm\n", name
    assert pickle.loads(pickle.dumps(onepass.layer_norm)) is onepass.layer_norm
    with pytest.raises(AttributeError, match="module 'onepass' has no attribute 'layer_nrom'"):
        _ = onepass.layer_nrom


def test_a_first_use_may_be_compiled() -> None:
    code = (
        "import torch, onepass\n"
        "@torch.compile(fullgraph=True, backend='eager')\n"
        "def f(x): return onepass.layer_norm_silu(x) + 1\n"
        "print(tuple(f(torch.ones(3, 96)).shape))"
    )
    assert python(code) == "(3, 96)\n"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from onepass.cli import app; app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    assert python(code).splitlines()[-1] == "False"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "onepass", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the source, built without fetching anything."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "onepass", source / "onepass", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=source)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(source.glob("*.whl")))


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    files = {str(f.relative_to(ROOT)) for f in (ROOT / "onepass").rglob("*") if f.is_file() and f.suffix != ".pyc"}
    packed = {name for name in wheel.namelist() if name.startswith("onepass/")}
    assert packed == files
    assert "onepass/py.typed" in packed


def test_wheel_holds_the_package_only(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel.namelist()} == {"onepass"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Version"] == onepass.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cuda", "demo", "peers", "dev"}
    assert any(n.endswith("/licenses/LICENSE") for n in wheel.namelist())


def test_command_line_entry_point() -> None:
    (script,) = entry_points(group="console_scripts", name="onepass")
    assert callable(script.load())


def test_constraints_pin_every_dependency_but_triton() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for pin in pins:
        assert [s.operator for s in pin.specifier] == ["=="], pin
        assert pin.marker is None, f"{pin}: one set for all Python versions"
    versions = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)).version for pin in pins}
    extras = PROJECT["optional-dependencies"]
    listed = PROJECT["dependencies"] + extras["cuda"] + extras["demo"] + extras["dev"]
    for requirement in map(Requirement, listed):
        if requirement.name == "triton":  # torch names its own
            assert "triton" not in versions
        else:
            assert requirement.specifier.contains(versions[requirement.name]), requirement
    assert versions["torch"] == "2.13.0"
