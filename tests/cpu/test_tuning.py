"""The tuner with a timer that says what we want, its files, and which config a call gets. No GPU is needed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from onepass import settings
from onepass.bench import machine
from onepass.bench.measure import Measured
from onepass.bench.record import Machine, Times
from onepass.cli import app
from onepass.dispatch import TABLE
from onepass.errors import OutputFolderError, TunedConfigWarning
from onepass.ops import tuned
from onepass.ops.layer_norm import config
from onepass.ops.layer_norm.op import Desc
from onepass.ops.layer_norm.reference import layer_norm as reference
from onepass.ops.spec import Inputs
from onepass.ops.tunable import Tunable, has_tunable
from onepass.tuning import command, report, search, store

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32
N = 64
ROWS = (1, 4, 8)


class Shape(NamedTuple):
    block: int


class Call:
    """What a config's kernel would be: right, unless its config is said to be otherwise."""

    def __init__(self, shape: Shape, inputs: Inputs, out: Inputs, faults: dict[int, str]) -> None:
        self.shape, self.inputs, self.out = shape, inputs, out["out"]
        self.fault = faults.get(shape.block, "")

    def __call__(self) -> None:
        if self.fault == "fails":
            raise RuntimeError("out of resources: shared memory\nand more")
        if self.fault == "writes half":
            self.out[..., : N // 2] = reference(**self.inputs)[..., : N // 2]
        else:
            self.out.copy_(reference(**self.inputs) + (0.1 if self.fault == "wrong" else 0.0))


def tunable(*blocks: int, faults: dict[int, str] | None = None) -> Tunable:
    """A tunable of layer_norm; the first block is the heuristic's."""
    shapes = [Shape(block) for block in blocks]
    return Tunable(
        op="layer_norm",
        backend="triton",
        heuristic=lambda n, dtype: shapes[0],
        candidates=lambda n, dtype: sorted(shapes),
        bind=lambda shape, inputs, out: Call(shape, inputs, out, faults or {}),
        sizes=(N,),
    )


def timer(time_us: Callable[[int, int], float]) -> Any:
    """Timers that give `time_us(block, rows)`."""

    class Fake:
        def __init__(self, device: torch.device, calls: list[Call]) -> None:
            assert not calls[0].fault, "a wrong or failing candidate was timed"
            us = time_us(calls[0].shape.block, calls[0].out.shape[0])
            self.measured = Measured("fake", Times(us, us, us, us, us, 1), None, None, 1)

        def round(self, seconds: float) -> None: ...

        def result(self) -> Measured:
            return self.measured

    return Fake


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few rows; files in a folder of the test's own; a GPU of sm_90 that nobody touches."""
    monkeypatch.setattr(search, "FEW_ROWS", ROWS[:-1])
    monkeypatch.setattr(search, "MANY_BYTES", ROWS[-1] * N * 4)
    monkeypatch.setattr(search, "count_sets", lambda case: 2)
    monkeypatch.setattr(settings, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(tuned, "shipped_file", lambda op, arch: tmp_path / "shipped" / op / f"{arch}.json")
    monkeypatch.setattr(tuned, "architecture", lambda device: "sm90")
    facts = Machine("cuda", "Test GPU", "test-gpu", 1, 1, 1, 1, "")
    monkeypatch.setattr(machine, "describe", lambda device: facts)
    tuned.forget()
    yield
    tuned.forget()


def run(t: Tunable, time_us: Callable[[int, int], float], dtype: torch.dtype = FP32) -> search.Outcome:
    return search.search(t, N, dtype, CPU, timer_of=timer(time_us))


def test_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert search.row_counts(4096, BF16) == (1, 512, 4096, 16384)
    assert search.row_counts(65536, BF16) == (1, 512, 1024)
    assert search.row_counts(2**28, FP32) == (1,)


def test_the_best_over_all_numbers_of_rows_wins() -> None:
    """Block 2 gains most and is out, since it loses at the end; block 3 is the best of the others."""
    times = {1: (10, 10, 10), 2: (5, 5, 10.4), 3: (8, 8, 10.2), 4: (20, 20, 9)}
    outcome = run(tunable(1, 2, 3, 4), lambda block, rows: times[block][ROWS.index(rows)])
    assert outcome.best is not None
    assert outcome.best.config == Shape(3)
    assert outcome.best.time_us == {1: 8, 4: 8, 8: 10.2}
    assert outcome.heuristic.config == Shape(1)
    assert outcome.gain == pytest.approx((10 * 10 * 10 / (8 * 8 * 10.2)) ** (1 / 3))


@pytest.mark.parametrize(("gain", "winner"), [(0.0, 5), (0.009, 5), (0.0101, 2)])
def test_a_tie_goes_to_the_heuristic(gain: float, winner: int) -> None:
    outcome = run(tunable(5, 2), lambda block, rows: 10.0 if block == 5 else 10.0 / (1 + gain))
    assert outcome.best is not None
    assert outcome.best.config == Shape(winner)
    assert (outcome.best is outcome.heuristic) == (winner == 5)


@pytest.mark.parametrize(
    ("fault", "why"), [("wrong", "wrong result: error"), ("writes half", "wrong result"), ("fails", "out of resources")]
)
def test_a_candidate_that_is_not_right_is_never_taken(fault: str, why: str) -> None:
    outcome = run(tunable(1, 2, 3, faults={2: fault}), lambda block, rows: 10.0 / block)
    assert outcome.best is not None
    assert outcome.best.config == Shape(3)
    (out,) = [trial for trial in outcome.trials if trial.why_not]
    assert out.config == Shape(2)
    assert why in out.why_not
    assert "\n" not in out.why_not


def test_a_heuristic_that_is_not_right_is_replaced() -> None:
    outcome = run(tunable(1, 2, faults={1: "fails"}), lambda block, rows: 10.0)
    assert outcome.best is not None
    assert outcome.best.config == Shape(2)
    assert outcome.gain is None


def test_progress_steps_add_up() -> None:
    t, steps = tunable(1, 2, 3, faults={2: "wrong"}), []
    search.search(t, N, FP32, CPU, steps.append, timer(lambda block, rows: 1.0))
    assert len(steps) == search.count_steps(t, N, FP32)
    assert "1×64 fp32: check block=1" in steps[0]


def saved(outcome: search.Outcome, ship: bool = False) -> tuple[bool, Path]:
    path = (tuned.shipped_file if ship else tuned.user_file)("layer_norm", "sm90")
    return store.save(outcome, path, tuned.shipped_file("layer_norm", "sm90"), CUDA), path


def test_the_store_gives_back_what_was_put_in() -> None:
    kept, path = saved(run(tunable(1, 2), lambda block, rows: 10.0 / block))
    assert kept
    (entry,) = tuned.read(path).values()
    assert entry.key == ("triton", N, "float32")
    assert entry.config == {"block": 2}
    assert entry.time_us == {"1": 5.0, "4": 5.0, "8": 5.0}
    assert entry.heuristic_us == {"1": 10.0, "4": 10.0, "8": 10.0}
    assert entry.device == "Test GPU"
    assert set(entry.versions) >= {"onepass", "torch"}
    assert len(entry.date) == len("2026-01-01")
    saved(run(tunable(1, 3), lambda block, rows: 10.0 / block, BF16))
    assert [(e.dtype, e.config) for e in tuned.read(path).values()] == [
        ("bfloat16", {"block": 3}),
        ("float32", {"block": 2}),
    ]
    assert [p.name for p in path.parent.iterdir()] == ["sm90.json"], "something temporary is left"


def test_no_entry_where_the_heuristic_wins() -> None:
    slower = run(tunable(1, 2), lambda block, rows: 10.0 * block)
    kept, path = saved(slower)
    assert not kept
    assert not path.exists()
    saved(run(tunable(1, 2), lambda block, rows: 10.0 / block))
    assert saved(slower) == (False, path), "an older entry goes when the heuristic wins"
    assert tuned.read(path) == {}


def test_nothing_is_kept_where_nothing_is_right() -> None:
    outcome = run(tunable(1, 2, faults={1: "wrong", 2: "fails"}), lambda block, rows: 1.0)
    assert outcome.best is None
    kept, path = saved(outcome)
    assert not kept
    assert not path.exists()


def test_the_user_takes_a_shipped_entry_back_to_the_heuristic() -> None:
    saved(run(tunable(1, 2), lambda block, rows: 10.0 / block), ship=True)
    kept, path = saved(run(tunable(1, 2), lambda block, rows: 10.0 * block))
    assert kept
    assert [entry.config for entry in tuned.read(path).values()] == [{"block": 1}]
    kept, _ = saved(run(tunable(1, 2), lambda block, rows: 10.0 / block))
    assert not kept, "the same as the shipped one"


def write(path: Path, *entries: tuned.Entry, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = {"format": tuned.FORMAT, "entries": [vars(entry) for entry in entries], **more}
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


DEFAULT = config.heuristic(4096, 2)
OTHER = next(c for c in config.candidates(4096, 2) if c != DEFAULT)
ENTRY = tuned.Entry("triton", 4096, "bfloat16", OTHER._asdict(), {"1": 2.0}, {"1": 2.5}, "Test GPU", {}, "2026-01-01")


def chosen(n: int = 4096, dtype: torch.dtype = BF16, num_rows: int = 7, device: torch.device = CUDA) -> config.Config:
    tuned.forget()
    return config.choose(Desc(device, dtype, dtype, dtype, num_rows, n, "silu", False, True, ()))


@pytest.mark.parametrize("file", [tuned.user_file, tuned.shipped_file])
def test_a_call_takes_the_entry_for_exactly_its_n_and_dtype(file: Any) -> None:
    write(getattr(tuned, file.__name__)("layer_norm", "sm90"), ENTRY)
    assert chosen() == OTHER != DEFAULT
    assert chosen(num_rows=1) == chosen(num_rows=2**20) == OTHER
    assert chosen(dtype=torch.float16) == DEFAULT
    assert chosen(n=4095) == config.heuristic(4095, 2)
    assert chosen(dtype=FP32) == config.heuristic(4096, 4)


def test_the_user_beats_what_is_shipped() -> None:
    write(
        tuned.shipped_file("layer_norm", "sm90"),
        ENTRY,
        replace(ENTRY, n=2048, config=config.heuristic(2048, 2)._asdict()),
    )
    write(tuned.user_file("layer_norm", "sm90"), replace(ENTRY, config=DEFAULT._asdict()))
    assert chosen() == DEFAULT
    assert chosen(n=2048) == config.heuristic(2048, 2)


def test_the_cpu_touches_no_gpu_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(tuned.user_file("layer_norm", "sm90"), ENTRY)
    monkeypatch.setattr(tuned, "architecture", lambda device: pytest.fail("asked for the GPU"))
    assert chosen(device=CPU) == DEFAULT


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written later is for the next process: one process never mixes two configs of one N."""
    assert chosen() == DEFAULT
    write(tuned.user_file("layer_norm", "sm90"), ENTRY)
    monkeypatch.setattr(tuned, "forget", lambda: None)
    assert chosen() == DEFAULT


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b'{"format": 1}', "KeyError"),
        (b'{"format": 99, "entries": []}', "format 99, not 1"),
        (b'{"format": 1, "entries": [{"n": 4096}]}', "TypeError"),
        (b'{"format": 1, "entries": [7]}', "TypeError"),
        (json.dumps({"format": 1, "entries": [vars(replace(ENTRY, config={"block": "x"}))]}).encode(), "no integer"),
        (json.dumps({"format": 1, "entries": [vars(replace(ENTRY, config=[]))]}).encode(), "AttributeError"),
    ],
)
def test_a_file_that_cannot_be_used(content: bytes, why: str) -> None:
    path = tuned.user_file("layer_norm", "sm90")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(TunedConfigWarning, match=why) as caught:
        assert chosen() == DEFAULT
    assert str(path) in str(caught[0].message)
    with pytest.warns(TunedConfigWarning):
        assert saved(run(tunable(1, 2), lambda block, rows: 10.0 / block))[0], "the tuner starts it anew"
    assert len(tuned.read(path)) == 1


@pytest.mark.parametrize(
    "stale", [{"block": 4096}, DEFAULT._asdict() | {"num_warps": 3}, DEFAULT._replace(chunks=1, block=64)._asdict()]
)
def test_a_config_that_the_kernel_no_longer_takes(stale: dict[str, int]) -> None:
    path = write(tuned.user_file("layer_norm", "sm90"), replace(ENTRY, config=stale))
    with pytest.warns(TunedConfigWarning, match="is no config of this version's kernel at n = 4096") as caught:
        assert chosen() == DEFAULT
    assert str(path) in str(caught[0].message)


def test_a_folder_that_cannot_be_written_is_said_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "architecture", lambda device: "sm90")
    (tmp_path / "cache").write_text("")
    with pytest.raises(OutputFolderError, match=r"is not a folder\. Choose another with ONEPASS_CACHE_DIR"):
        store.file_for("layer_norm", CUDA, ship=False)
    assert store.file_for("layer_norm", CUDA, ship=True).name == "sm90.json"


@pytest.mark.parametrize("element_size", [2, 4])
def test_candidates_hold_the_heuristic_and_are_valid(element_size: int) -> None:
    for n in (*range(1, 300, 7), 576, 768, 1024, 4096, 5120, 8192, 16384, 16385, 65536, 100003):
        found = config.candidates(n, element_size)
        assert config.heuristic(n, element_size) in found, n
        assert len(set(found)) == len(found)
        assert all(config.is_valid(c, n) for c in found), n


def test_every_shipped_entry_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    dtypes = {tuned.dtype_key(dtype): dtype for dtype in (FP32, BF16, torch.float16)}
    folder = Path(tuned.__file__).parent
    for path in folder.glob("*/tuned/*.json"):
        assert path.parent.parent.name == "layer_norm"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            entries = tuned.read(path)
        for entry in entries.values():
            size = dtypes[entry.dtype].itemsize
            shape = config.Config(**entry.config)
            assert shape in config.candidates(entry.n, size), entry
            assert shape != config.heuristic(entry.n, size), entry


def test_who_can_be_tuned() -> None:
    assert [op for op in TABLE if has_tunable(op)] == ["layer_norm"]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "default_device", lambda: CPU)
    result = CliRunner().invoke(app, ["tune", "layer_norm"])
    assert result.exit_code == 2
    assert "tuning times kernels on a GPU, and torch finds none here" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("layernorm",), "Did you mean 'layer_norm'?"),
        (("layer_norm", "--dtype", "bf61"), "Did you mean 'bf16'?"),
        (("layer_norm", "--n", "0"), "Invalid value for '--n'"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


@pytest.mark.parametrize("ship", [False, True])
def test_the_command(ship: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU: the table, the file, and which of the two."""
    seen = []

    def found(t: Tunable, n: int, dtype: torch.dtype, device: torch.device, on_step: Any) -> search.Outcome:
        on_step("step")
        seen.append((n, dtype, device))
        return run(tunable(1, 2, 3, faults={3: "wrong"}), lambda block, rows: 10.0 / block, dtype)

    monkeypatch.setattr(command, "load", lambda op: tunable(1, 2, 3))
    monkeypatch.setattr(command, "default_device", lambda: CUDA)
    monkeypatch.setattr(command, "architecture", lambda device: "sm90")
    monkeypatch.setattr(command, "search", found)
    monkeypatch.setattr(command, "_other_backend", lambda t, n, dtype, device: "cuda" if n == 128 else None)
    monkeypatch.setattr(store, "architecture", lambda device: "sm90")
    for module in (command, store):
        monkeypatch.setattr(module, "shipped_file", tuned.shipped_file)
    arguments = ["tune", "layer_norm", "--n", "64", "--n", "128", "--dtype", "fp32", *["--ship"] * ship]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert seen == [(64, FP32, CUDA), (128, FP32, CUDA)]
    said = " ".join(result.output.split())
    assert "config 1 row, µs 4 rows, µs 8 rows, µs against the heuristic" in said
    assert "block=2 5.00 5.00 5.00 2.000× block=1 10.00 10.00 10.00 heuristic block=3 – – – out" in said
    assert "block=3: wrong result" in said
    assert "best: block=2, 2.000 times as fast as the heuristic's; kept in" in said
    assert said.count("Plain calls of this size run on 'cuda'") == 1
    path = (tuned.shipped_file if ship else tuned.user_file)("layer_norm", "sm90")
    other = (tuned.user_file if ship else tuned.shipped_file)("layer_norm", "sm90")
    assert len(tuned.read(path)) == 1
    assert not other.exists()


@pytest.mark.parametrize(
    ("faults", "factor", "expected"),
    [
        ({1: "fails", 2: "fails"}, 1.0, "nothing is kept"),
        ({}, 1.0, "the heuristic's config stays"),
        ({1: "fails"}, 1.0, "best: block=2; kept in"),
    ],
)
def test_what_is_said_at_the_end(faults: dict[int, str], factor: float, expected: str) -> None:
    console = Console(record=True, width=100)
    outcome = run(tunable(1, 2, faults=faults), lambda block, rows: factor)
    report.print_outcome(outcome, console)
    report.print_saved(outcome, *saved(outcome), console)
    assert expected in console.export_text()
