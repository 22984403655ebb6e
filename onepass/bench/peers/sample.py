"""Peers of sample with top_p, on a GPU: FlashInfer's softmax and its sampling without a sort."""

from __future__ import annotations

import importlib.util
from typing import Any

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer': pip install flashinfer-python")
    from flashinfer import sampling

    def run(logits: Any, top_p: float, seed: Any) -> Any:
        return sampling.top_p_sampling_from_probs(sampling.softmax(logits.float()), top_p)

    return run


PEERS = (Provider("flashinfer", _flashinfer, one_pass=False),)
