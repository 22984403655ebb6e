"""The facts about a machine that a figure depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from functools import lru_cache
from pathlib import Path

import torch

from onepass.bench.record import Machine
from onepass.version import VERSION

PACKAGES = ("torch", "triton", "numba", "numpy", "cuda-core", "liger-kernel", "flashinfer-python", "transformers")
# Assumed where the system does not say; it only decides how many buffers are rotated.
UNKNOWN_CACHE = 64 * 2**20


def describe(device: torch.device) -> Machine:
    """The machine as one of its devices is measured."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, cores = properties.name, properties.multi_processor_count
        memory, cache = properties.total_memory, known_cache_bytes(device)
        slug = _slug(name)
    else:
        cores, memory, cache = _usable_cores(), _memory_total(), known_cache_bytes(device)
        name = f"{_cpu_name()}, {cores} cores"
        slug = _slug(f"cpu-{_cpu_name()}-{cores}-cores")
    system = f"{platform.system()} {platform.machine()}"
    return Machine(device.type, name, slug, cores, torch.get_num_threads(), memory, cache, system)


def versions() -> dict[str, str]:
    """Versions of what a figure depends on; a package that is not installed is left out."""
    found = {"onepass": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache, or a guess on the large side where it is not known."""
    return known_cache_bytes(device) or UNKNOWN_CACHE


@lru_cache(maxsize=8)
def known_cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: the L2 of a GPU, the L3 of a CPU. 0 where the system does not say."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0)


def load() -> float:
    """How many programs wanted a core in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now; 0 is never returned, a very large number where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _memory_line("MemAvailable") or sys.maxsize


def _memory_total() -> int:
    return _memory_line("MemTotal")


def _memory_line(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(path: Path) -> int:
    found = re.fullmatch(r"(\d+)([KM]?)", _read(str(path)).strip())
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # another system than Linux, or a sandbox
        return ""


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
