"""Peers of silu_and_mul on a GPU: FlashInfer, and Liger's SwiGLU, which takes gate and up apart."""

from __future__ import annotations

import importlib.util
from typing import Any

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer': pip install flashinfer-python")
    import flashinfer

    def run(x: Any) -> Any:
        return flashinfer.silu_and_mul(x)

    return run


def _liger(spec: OpSpec) -> Function:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ProviderUnavailableError("needs the package 'liger-kernel': pip install liger-kernel")
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def run(x: Any) -> Any:
        # Liger reads rows of [tokens, intermediate_size] without strides: halves of one tensor are copied first.
        gate, up = x.chunk(2, -1)
        return LigerSiLUMulFunction.apply(gate, up)

    return run


PEERS = (Provider("flashinfer", _flashinfer), Provider("liger", _liger, one_pass=False))
