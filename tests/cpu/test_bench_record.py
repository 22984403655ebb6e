"""Rows and files: what is written comes back, and nothing is ever half-written."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from onepass.bench.record import Times, atomic_file, check_folder, load, write_csv, write_json
from onepass.errors import OutputFolderError
from tests.cases.bench import cpu_run, gpu_run


def test_percentiles() -> None:
    times = Times.of([float(i) for i in range(101, 0, -1)])
    assert (times.best, times.p20, times.p50, times.p80, times.p99) == (1.0, 21.0, 51.0, 81.0, 100.0)
    assert times.samples == 101


def test_percentiles_of_one_sample() -> None:
    assert Times.of([3.0]) == Times(3.0, 3.0, 3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize("run", [gpu_run(), cpu_run()], ids=["gpu", "cpu"])
def test_json_comes_back(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "run.json"
    write_json(run, path)
    once = load(path)
    write_json(once, path)
    assert load(path) == once
    assert once.machine == run.machine
    assert [row.provider for row in once.rows] == [row.provider for row in run.rows]
    assert once.rows[0].kernel_us is not None
    assert once.rows[0].kernel_us.p50 == pytest.approx(run.rows[0].kernel_us.p50, rel=1e-4)


def test_a_measured_zero_is_not_a_missing_figure(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(cpu_run(), path)
    rows = load(path).rows
    assert rows[1].page_faults == 0.0
    assert rows[3].page_faults is None


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(replace(gpu_run(), format=99), path)
    with pytest.raises(ValueError, match="format"):
        load(path)


def test_csv_lines_carry_machine_versions_date_and_command(tmp_path: Path) -> None:
    run = gpu_run()
    write_csv(run, tmp_path / "run.csv")
    with open(tmp_path / "run.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(run.rows)
    for line in lines:
        assert line["machine"] == "NVIDIA Test"
        assert line["versions"] == "onepass=0.1.0 torch=2.11.0"
        assert line["command"] == run.command
        assert line["date"] == run.date
    assert lines[0]["shape"] == "4x1024x4096"
    assert float(lines[0]["kernel_p50_us"]) == 50.3


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_readable_and_small(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(gpu_run(), path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw["rows"][0]["kernel_us"]["p50"] == 50.3
    assert path.stat().st_size < 1000 * len(raw["rows"]) + 2000


def test_a_folder_is_checked_without_making_it(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFolderError, match="not a folder"):
        check_folder(tmp_path / "file" / "results")


def test_a_folder_that_takes_no_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OutputFolderError, match="Permission denied"):
        check_folder(tmp_path)
