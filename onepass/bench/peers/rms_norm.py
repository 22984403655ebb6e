"""Peers of rms_norm with a residual, on a GPU: FlashInfer's and Liger's fused add and RMSNorm."""

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

    def run(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    return run


def _liger(spec: OpSpec) -> Function:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ProviderUnavailableError("needs the package 'liger-kernel': pip install liger-kernel")
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def run(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)

    return run


PEERS = (Provider("flashinfer", _flashinfer, in_place=True), Provider("liger", _liger))
