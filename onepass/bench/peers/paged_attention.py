"""Peers of paged_attention on a GPU: FlashInfer's decode at its best setting, which on Hopper is not its default."""

from __future__ import annotations

import importlib.util
from typing import Any

from onepass.bench.providers import Function, Provider
from onepass.errors import ProviderUnavailableError
from onepass.ops.spec import OpSpec

_WORKSPACE_BYTES = 256 << 20


def _flashinfer(spec: OpSpec) -> Function:
    if importlib.util.find_spec("flashinfer") is None:
        raise ProviderUnavailableError("needs the package 'flashinfer-python': pip install flashinfer-python")
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    planned: dict[int, Any] = {}

    def run(q: Any, key_cache: Any, value_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
        # A plan reads the lengths on the host: one for each set of inputs, as an engine plans once a step.
        key = block_table.data_ptr()
        if key not in planned:
            batch, max_pages = block_table.shape
            page_size, num_kv_heads, head_dim = key_cache.shape[1:]
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
            wrapper.plan(
                torch.arange(batch + 1, dtype=torch.int32, device=q.device) * max_pages,
                block_table.flatten(),
                ((cache_seqlens - 1) % page_size + 1).int(),
                q.shape[2],
                num_kv_heads,
                head_dim,
                page_size,
                q_data_type=q.dtype,
                kv_data_type=key_cache.dtype,
            )
            planned[key] = wrapper
        return planned[key].run(q[:, 0], (key_cache, value_cache))[:, None]

    return run


PEERS = (Provider("flashinfer", _flashinfer),)
