"""Peers of apply_rope on a GPU: FlashInfer's and Liger's kernels."""

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

    def run(q: Any, k: Any, cos_sin_cache: Any, positions: Any) -> Any:
        num_tokens, _, head_dim = q.shape
        flat_q, flat_k = q.view(num_tokens, -1), k.view(num_tokens, -1)
        results = flashinfer.apply_rope_with_cos_sin_cache(positions, flat_q, flat_k, head_dim, cos_sin_cache, True)
        return tuple(result.view(x.shape) for result, x in zip(results, (q, k), strict=True))

    return run


def _liger(spec: OpSpec) -> Function:
    """It takes cosines and sines that are gathered already, and turns q and k in place: a copy stands before it."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ProviderUnavailableError("needs the package 'liger-kernel': pip install liger-kernel")
    from liger_kernel.ops.rope import LigerRopeFunction

    from onepass.ops.rope_spec import gathered

    def run(q: Any, k: Any, cos_sin_cache: Any, positions: Any) -> Any:
        cos, sin = (t.transpose(0, 1) for t in gathered(cos_sin_cache, positions, q.dtype, False))
        results = LigerRopeFunction.apply(
            *(x.clone().unsqueeze(0).transpose(1, 2) for x in (q, k)), cos.contiguous(), sin.contiguous()
        )
        return tuple(result.transpose(1, 2).squeeze(0) for result in results)

    return run


PEERS = (Provider("flashinfer", _flashinfer), Provider("liger", _liger, one_pass=False))
