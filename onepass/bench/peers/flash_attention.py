"""Peers of flash_attention: SDPA on a CPU; FlashAttention-2 and cuDNN behind it, and FlashInfer, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _sdpa(backends: list[SDPBackend], spec: OpSpec) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        # SDPA aligns the causal mask to the top left, which is the same where there are as many queries as keys.
        is_causal = causal and q.shape[1] > 1
        assert not is_causal or q.shape[1] == k.shape[1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return run


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer': pip install flashinfer-python")
    import flashinfer
    import torch

    plans: dict[tuple[Any, ...], Callable[..., Tensor]] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Its packed form, planned once for each shape; the planning is not timed."""
        key = (q.shape, k.shape, q.dtype, causal)
        if key not in plans:
            workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            starts = [torch.arange(t.shape[0] + 1, device=q.device, dtype=torch.int32) * t.shape[1] for t in (q, k)]
            heads = (q.shape[2], k.shape[2], q.shape[3])
            wrapper.plan(*starts, *heads, causal=causal, q_data_type=q.dtype, kv_data_type=k.dtype)
            plans[key] = wrapper.run
        return plans[key](q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(q.shape)

    return run


PEERS = (
    Provider("SDPA", partial(_sdpa, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), devices=("cpu",)),
    Provider("SDPA flash", partial(_sdpa, [SDPBackend.FLASH_ATTENTION])),
    Provider("SDPA cuDNN", partial(_sdpa, [SDPBackend.CUDNN_ATTENTION])),
    Provider("flashinfer", _flashinfer),
)
