"""Rows of a kernel call shared among threads.

The calling thread works, and up to `torch.get_num_threads() - 1` threads of a pool help. Each takes the next rows
from a counter inside the compiled kernel, with the GIL released, so a thread that starts late or is slow costs
little, and a call made while the pool is busy with another is finished by its caller. Which thread computes a row
changes nothing in the row.

Numba's `parallel=True` is not used: its default layer aborts the process when two threads call at once, and the
one on GNU OpenMP aborts in the child of a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import addressof, c_int64
from typing import Any

import torch

# Below this many elements a call runs on the calling thread alone. One core takes 150 to 180 µs for them in a norm or
# a softmax, and that is where two threads begin to win: a sleeping thread's help costs about 80 µs in all.
PARALLEL_ELEMENTS = 524288

# What a thread takes at a time: enough to make taking it free, little enough that threads finish together.
_CHUNK_ELEMENTS = 65536


class _Pool:
    """A thread pool that grows to what is asked for and starts afresh in the child of a fork."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all threads, and a lock that one of them may hold: neither exists in the child of a fork."""
        self._lock = threading.Lock()
        self._size = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, helpers: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Future[Any]]:
        """Run `function(*args)` on up to `helpers` threads; fewer where no thread can be started."""
        with self._lock:
            if self._executor is None or self._size < helpers:
                # Threads of the smaller pool end by themselves once they have done what they were given.
                if self._executor is not None:
                    self._executor.shutdown(wait=False)
                self._executor, self._size = ThreadPoolExecutor(helpers, "onepass"), helpers
            futures: list[Future[Any]] = []
            try:
                for _ in range(helpers):
                    futures.append(self._executor.submit(function, *args))
            except RuntimeError:
                # The interpreter is shutting down, or the system has no thread left. The caller does the work.
                pass
            return futures


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.restart)


def run_rows(
    kernel: Callable[..., Any], args: tuple[Any, ...], num_rows: int, row_elements: int, cost: float = 1.0
) -> None:
    """Call `kernel(*args, num_rows, chunk, counter)` on one thread or several.

    The kernel takes `chunk` rows at a time from the int64 at the address `counter` until `num_rows` are taken.
    `cost` is what an element takes beside one of a norm.
    """
    counter = c_int64()
    elements = num_rows * row_elements
    if elements * cost < PARALLEL_ELEMENTS or num_rows == 1:
        kernel(*args, num_rows, num_rows, addressof(counter))
        return
    threads = torch.get_num_threads()
    chunk = max(1, min(_CHUNK_ELEMENTS // row_elements, -(-num_rows // threads)))
    helpers = min(threads, -(-num_rows // chunk)) - 1
    args = (*args, num_rows, chunk, addressof(counter))
    futures = _pool.submit(helpers, kernel, args) if helpers > 0 else []
    try:
        kernel(*args)
    finally:
        # A helper that has not started has nothing left to do. The others hold addresses: they must finish first.
        for future in futures:
            if not future.cancel():
                future.result()
