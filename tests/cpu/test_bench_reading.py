"""What is said of a run: the words, the table and the pictures."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from onepass.bench.plot import draw_run
from onepass.bench.reading import read
from onepass.bench.roofline import draw_roofline
from onepass.bench.style import spread
from onepass.bench.table import bytes_text, duration, figure, print_run
from tests.cases.bench import cpu_run, gpu_run, times


def sentence(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_reading_of_a_gpu() -> None:
    lines = list(read(gpu_run()))
    headline = lines[0]
    assert headline.startswith("4×1024×4096 bf16: onepass out= takes 19.5 µs, eager 50.3 µs (2.58×)")
    assert "The floor is 18.2 µs" in headline
    assert "93% of a copy" in headline
    assert "by bytes alone one pass gains 2.00×" in headline
    assert "1×4096 (" in sentence(lines, "bf16, launch-bound: ")
    assert "512×4096 (" in sentence(lines, "bf16, cache-bound: ")
    assert "65536×4096 (98% of a copy)" in sentence(lines, "bf16, memory-bound: ")
    assert not any("Page faults" in line or "busy" in line for line in lines)


def test_an_op_that_mostly_reads_is_held_against_a_read() -> None:
    run = gpu_run()
    run = replace(run, rows=tuple(replace(row, ceiling="read") for row in run.rows))
    lines = list(read(run))
    assert (
        "The floor is 18.2 µs, what a read of the same bytes takes here: onepass out= is at 93% of a read" in lines[0]
    )
    memory = sentence(lines, "bf16, memory-bound: ")
    assert "65536×4096 (98% of a read)" in memory
    assert "a read reaches 4,680 GB/s here" in memory
    text = io.StringIO()
    print_run(run, Console(file=text, width=200))
    assert "4×1024×4096 bf16, 32 MB, read 18.2 µs" in text.getvalue()
    assert "of read: share of a read's speed" in text.getvalue()
    assert "copy" not in text.getvalue()


def test_a_defeat_is_said() -> None:
    lines = list(read(gpu_run()))
    defeat = sentence(lines, "torch.compile is faster")
    assert "65536×768 bf16 (59.6 µs against 61.0 µs" in defeat
    assert "4096×4096" not in defeat


def test_a_difference_within_the_spread_is_none() -> None:
    run = gpu_run()
    rows = [
        replace(r, kernel_us=times(60.5, 0.05)) if (r.shape, r.provider) == ((65536, 768), "torch.compile") else r
        for r in run.rows
    ]
    assert not any("is faster" in line for line in read(replace(run, rows=tuple(rows))))


def test_page_faults_are_told_apart_from_fusion() -> None:
    lines = list(read(cpu_run()))
    faults = sentence(lines, "Page faults")
    assert "eager takes 36.6 ms as users call it and 7.00 ms on a warm heap" in faults
    assert "81%, is 16,385 page faults a call (1.81 µs each)" in faults
    assert "7.96× over the first and 1.52× over the second: only the second is fusion" in faults
    assert "eager is faster than onepass at 1×4096" in sentence(lines, "eager is faster")


def test_a_wrong_provider_comes_first() -> None:
    run = gpu_run()
    wrong = replace(run.rows[1], status="wrong", reason="error 1, allowed 0.1", kernel_us=None)
    lines = list(read(replace(run, rows=(run.rows[0], wrong, *run.rows[2:]))))
    assert lines[0].startswith("WRONG: torch.compile at 4×1024×4096 bf16: error 1")


def test_a_busy_machine_is_said() -> None:
    run = cpu_run()
    scattered = [replace(r, kernel_us=times(10.0, 0.4)) for r in run.rows]
    assert "busy (load 3.0 on 2 cores" in next(read(replace(run, rows=tuple(scattered), load=3.0)))


def test_what_the_time_limit_left_out_is_said() -> None:
    assert list(read(replace(cpu_run(), left_out=("8×8 fp32",))))[-1].endswith(": 8×8 fp32.")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("run", [gpu_run(), cpu_run()], ids=["gpu", "cpu"])
def test_the_table_fits(run, width: int) -> None:  # type: ignore[no-untyped-def]
    text = io.StringIO()
    print_run(run, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text.getvalue()
    assert sum(line.startswith("onepass out=") for line in lines) == sum(r.provider == "onepass out=" for r in run.rows)


def test_a_provider_that_is_missing_everywhere_is_said_once() -> None:
    run, text = gpu_run(), io.StringIO()
    why = "needs the package 'liger-kernel'"
    cases = {row.shape: row for row in run.rows}
    liger = [replace(r, provider="liger", status="unavailable", reason=why, kernel_us=None) for r in cases.values()]
    rows = sorted((*run.rows, *liger), key=lambda r: list(cases).index(r.shape))
    print_run(replace(run, rows=tuple(rows)), Console(file=text, width=100))
    assert text.getvalue().count(why) == 1


def test_figures() -> None:
    assert [figure(v) for v in (1234.5, 123.4, 12.34, 1.234, None)] == ["1,234", "123", "12.3", "1.23", "–"]
    assert [duration(v) for v in (1.0, 999.0, 36_600.0)] == ["1.00 µs", "999 µs", "36.6 ms"]
    assert [bytes_text(v) for v in (8192, 2**25, 3 * 2**30, 1010 * 1024)] == ["8 KB", "32 MB", "3 GB", "0.986 MB"]


def test_labels_move_apart_and_stay_inside() -> None:
    placed = spread([0.5, 0.51, 0.9, 0.97, 0.98], 0.06, 0.0, 1.0)
    ordered = sorted(placed)
    assert all(b - a >= 0.06 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[-1] <= 1.0
    assert placed == ordered


@pytest.mark.parametrize("run", [gpu_run(), cpu_run()], ids=["gpu", "cpu"])
def test_pictures_in_light_and_dark(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    drawn = draw_run(run, tmp_path / run.name) + draw_roofline(run, tmp_path / "roofline")
    assert [p.name for p in drawn] == [
        "layer_norm_silu.png",
        "layer_norm_silu-dark.png",
        "roofline.png",
        "roofline-dark.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)


def test_nothing_timed_gives_no_picture(tmp_path: Path) -> None:
    run = replace(gpu_run(), rows=tuple(replace(r, kernel_us=None, speedup=None) for r in gpu_run().rows))
    assert draw_run(run, tmp_path / "x") == []
    assert draw_roofline(run, tmp_path / "y") == []
