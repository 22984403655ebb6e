"""The unfused ops on a warm heap: a second CPU baseline, without the page faults of fresh large outputs.

glibc takes a block above 32 MB from the system and gives it back when it is freed, so every fresh output of
that size costs a page fault for each 4 KB. A program that keeps its buffers does not pay this. With
M_MMAP_MAX=0 and a huge M_TRIM_THRESHOLD freed pages stay in the heap and are used again.

This is done in a process of its own. The settings cannot be taken back: the first call of mallopt ends glibc's
own adaptation of its thresholds, and the other providers of the same process would then fault where a user's
do not. The process answers one JSON line for each line it is sent.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict
from types import TracebackType
from typing import Any

from onepass.bench.measure import Measured
from onepass.bench.record import Times
from onepass.errors import ProviderUnavailableError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER_TRIM = 2**31 - 1


class WarmHeap:
    """The process with the warm heap; started at the first timer, ended with the `with` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> WarmHeap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def timer(self, op: str, shape: tuple[int, ...], dtype: str, sets: int) -> WarmHeapTimer:
        """A timer of the op's unfused form on `sets` sets of random inputs.

        Raises:
            ProviderUnavailableError: the allocator here is not glibc's, or the process ended.
        """
        import torch

        if self._process is None:
            # A session of its own: Ctrl-C is this process's business, which then ends the other.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onepass.bench.warm_heap"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self.ask("prepare", op=op, shape=shape, dtype=dtype, sets=sets, threads=torch.get_num_threads())
        return WarmHeapTimer(self)

    def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"what": what} | arguments) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ProviderUnavailableError("the process with the warm heap ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ProviderUnavailableError(answer["error"])
        return answer["result"]


class WarmHeapTimer:
    """A timer whose samples are taken in the other process. One is in use at a time."""

    def __init__(self, heap: WarmHeap) -> None:
        self._heap = heap

    def round(self, seconds: float) -> None:
        self._heap.ask("round", seconds=seconds)

    def result(self) -> Measured:
        raw = self._heap.ask("result")
        method = raw["method"] + ", mallopt(M_MMAP_MAX=0)"
        return Measured(method, Times(**raw["kernel"]), None, None, raw["calls_per_sample"], raw["page_faults"])


def keep_freed_memory() -> None:
    """Make this process reuse freed memory, whatever its size.

    Raises:
        ProviderUnavailableError: the C library has no mallopt, or refuses.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError) as error:  # no C library by that name (Windows), or not glibc
        raise ProviderUnavailableError("needs glibc's mallopt, which this system does not have") from error
    if not (mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)):
        raise ProviderUnavailableError("mallopt refused M_MMAP_MAX=0: this allocator is not glibc's")


def serve() -> None:
    """Answer requests until the other side closes."""
    import torch

    from onepass.bench.measure import WallTimer
    from onepass.bench.sweep import bind, make_sets
    from onepass.ops import spec as specs

    timer: WallTimer | None = None
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        result: Any = None
        try:
            if request["what"] == "prepare":
                timer = None  # its buffers go first, so that they can be used again
                keep_freed_memory()
                torch.set_num_threads(request["threads"])
                spec = specs.load(request["op"])
                dtype = getattr(torch, request["dtype"])
                sets = make_sets(spec, tuple(request["shape"]), dtype, torch.device("cpu"), request["sets"])
                with torch.no_grad():
                    timer = WallTimer([bind(spec.unfused, inputs, {}) for inputs in sets])
            elif timer is not None and request["what"] == "round":
                with torch.no_grad():
                    timer.round(request["seconds"])
            elif timer is not None:
                result = asdict(timer.result())
            answer = {"result": result}
        except (RuntimeError, MemoryError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
