"""A peer of qkv_proj on a GPU: FlashInfer's norm and RoPE around torch's product, the append by torch."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch.nn import functional as F

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer': pip install flashinfer-python")
    import flashinfer

    def run(
        x: Any,
        w_qkv: Any,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_weight: Any,
        norm_eps: float,
        cos_sin_cache: Any,
        positions: Any,
        key_cache: Any,
        value_cache: Any,
        slot_mapping: Any,
    ) -> Any:
        qkv = F.linear(flashinfer.norm.rmsnorm(x, norm_weight, norm_eps), w_qkv)
        sizes = (num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        q, k, v = qkv.split(sizes, dim=-1)
        q, k = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, head_dim, cos_sin_cache, True)
        q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
        key_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, k)
        value_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, v)
        return q, k, v

    return run


PEERS = (Provider("flashinfer", _flashinfer, one_pass=False),)
