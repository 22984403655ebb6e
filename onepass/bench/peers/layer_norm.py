"""Peers of layer_norm followed by SiLU, on a GPU: the obvious Triton kernel, and Liger's LayerNorm."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch.nn import functional as F

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _plain_triton(spec: OpSpec) -> Function:
    if importlib.util.find_spec("triton") is None:
        raise ProviderUnavailableError("needs the package 'triton': pip install triton")
    from onepass.bench.peers.plain_triton_layer_norm import layer_norm_silu

    def run(x: Any, weight: Any, bias: Any, eps: float, activation: str) -> Any:
        assert activation == "silu"
        return layer_norm_silu(x, weight, bias, eps)

    return run


def _liger(spec: OpSpec) -> Function:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ProviderUnavailableError("needs the package 'liger-kernel': pip install liger-kernel")
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def run(x: Any, weight: Any, bias: Any, eps: float, activation: str) -> Any:
        assert activation == "silu"
        return F.silu(LigerLayerNormFunction.apply(x, weight, bias, eps))

    return run


PEERS = (Provider("plain triton", _plain_triton), Provider("liger", _liger, one_pass=False))
