"""Peers of softmax on a GPU: FlashInfer's, which takes float32 logits."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer': pip install flashinfer-python")
    import flashinfer

    def run(logits: Any, temperature: Any) -> Any:
        if logits.dtype != torch.float32:
            raise ProviderUnavailableError(f"takes float32, and the logits are {logits.dtype}")
        return flashinfer.sampling.softmax(logits, temperature)

    return run


PEERS = (Provider("flashinfer", _flashinfer),)
