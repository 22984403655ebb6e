"""Who is measured: the unfused ops, torch.compile of them, onepass, and an op's peers where installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onepass.errors import OnepassError
from onepass.ops.spec import OpSpec

EAGER = "eager"
EAGER_WARM = "eager, warm heap"
COMPILE = "torch.compile"
ONEPASS = "onepass"
ONEPASS_OUT = "onepass out="

Function = Callable[..., Any]


@dataclass(frozen=True)
class Provider:
    """One way to compute an op. `build(spec)` gives the function, called with the op's inputs by name.

    `one_pass` says that it moves the least bytes by the model (`spec.bytes_moved`, else `spec.unfused_bytes`).
    `in_place` says that it overwrites its inputs, so that it needs some of its own. `launches` is the model's count of
    kernels a call, where the model says it; `warm_heap` has it timed in the process of `warm_heap.py`. `devices`: the
    kinds that a peer is for. `build` raises ProviderUnavailableError with what is missing.
    """

    name: str
    build: Callable[[OpSpec], Function]
    one_pass: bool = True
    takes_out: bool = False
    in_place: bool = False
    warm_heap: bool = False
    devices: tuple[str, ...] = ("cuda",)
    launches: Callable[[OpSpec], int | None] = lambda spec: None


def providers_for(spec: OpSpec, device: torch.device) -> tuple[Provider, ...]:
    """All providers of an op on a device, the baseline first; peers that cannot run say so when built."""
    providers = [
        Provider(EAGER, lambda spec: spec.unfused, one_pass=False, launches=lambda spec: spec.unfused_launches)
    ]
    if device.type == "cpu":
        providers.append(
            Provider(
                EAGER_WARM,
                lambda spec: spec.unfused,
                one_pass=False,
                warm_heap=True,
                launches=lambda spec: spec.unfused_launches,
            )
        )
    providers.append(Provider(COMPILE, _compiled))
    providers += [peer for peer in peers(spec.op) if device.type in peer.devices]
    providers.append(Provider(ONEPASS, lambda spec: spec.fused, launches=lambda spec: 1))
    providers.append(Provider(ONEPASS_OUT, lambda spec: spec.fused, takes_out=True, launches=lambda spec: 1))
    return tuple(providers)


def peers(op: str) -> tuple[Provider, ...]:
    """The op's optional peers: `PEERS` of `bench/peers/<op>.py`, if there is one."""
    module = f"onepass.bench.peers.{op}"
    return importlib.import_module(module).PEERS if importlib.util.find_spec(module) else ()


def _compiled(spec: OpSpec) -> Function:
    # Without the reset a sweep's sizes count as recompilations of one function, which are limited to 8.
    torch.compiler.reset()
    return torch.compile(spec.unfused, dynamic=False, fullgraph=True)


def failures() -> tuple[type[Exception], ...]:
    """What a provider may raise when it cannot run here: the sweep notes it and goes on.

    RuntimeError covers torch's own (out of memory, Dynamo, Inductor, CUDA), NoBackendError and numba's are below
    it or below the others named here.
    """
    kinds: list[type[Exception]] = [OnepassError, RuntimeError, ImportError, OSError, ValueError, TypeError]
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError

        kinds.append(TritonError)
    if importlib.util.find_spec("numba") is not None:
        from numba.core.errors import NumbaError

        kinds.append(NumbaError)
    return tuple(kinds)


def short_reason(error: Exception) -> str:
    """The part of an error that fits a table: all of our own, whose lines are reasons, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OnepassError):
        return "; ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
