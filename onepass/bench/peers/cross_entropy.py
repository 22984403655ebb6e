"""Peers of cross_entropy on a GPU: Liger's kernel, forward."""

from __future__ import annotations

import importlib.util
from typing import Any

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _liger(spec: OpSpec) -> Function:
    if importlib.util.find_spec("liger_kernel") is None:
        raise ProviderUnavailableError("needs the package 'liger-kernel': pip install liger-kernel")
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def run(logits: Any, target: Any, reduction: str) -> Any:
        return LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, reduction)[0]

    return run


PEERS = (Provider("liger", _liger),)
