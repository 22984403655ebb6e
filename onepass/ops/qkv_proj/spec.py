"""What benchmarks and tests need to know of qkv_proj."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.qkv_proj.op import qkv_proj
from onepass.ops.qkv_proj.reference import qkv_proj as reference
from onepass.ops.rope_spec import cos_sin_table
from onepass.ops.spec import Inputs, OpSpec, tensor_bytes

LLAMA_3_8B, SMOLLM2_135M = 4096, 576
HEADS = {LLAMA_3_8B: (32, 8, 128), SMOLLM2_135M: (9, 3, 64)}
"""num_q_heads, num_kv_heads and head_dim of the models that a hidden_size stands for."""

MAX_POSITION = 8192
PAGE_SIZE = 16


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """[num_tokens, hidden_size] of a model of `HEADS`, or of one with four q heads."""
    num_tokens, hidden_size = shape
    return layer_inputs(num_tokens, hidden_size, *HEADS.get(hidden_size, (4, 2, 32)), dtype, device, seed)


def layer_inputs(
    num_tokens: int,
    hidden_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Inputs:
    """Random x, weights and positions, everything a Llama layer does, and slots all over the cache."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=generator)

    pages = 2 * -(-num_tokens // PAGE_SIZE)
    cache = (pages, PAGE_SIZE, num_kv_heads, head_dim)
    features = (num_q_heads + 2 * num_kv_heads) * head_dim
    return {
        "x": normal(num_tokens, hidden_size).to(dtype),
        "w_qkv": (normal(features, hidden_size) * hidden_size**-0.5).to(dtype),
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_weight": (1 + 0.1 * normal(hidden_size)).to(dtype),
        "norm_eps": 1e-5,
        "cos_sin_cache": cos_sin_table(MAX_POSITION, head_dim, device),
        "positions": torch.randint(0, MAX_POSITION, (num_tokens,), device=device, generator=generator),
        "key_cache": normal(*cache).to(dtype),
        "value_cache": normal(*cache).to(dtype),
        "slot_mapping": torch.randperm(pages * PAGE_SIZE, device=device, generator=generator)[:num_tokens],
    }


def unfused(
    x: Tensor,
    w_qkv: Tensor,
    bias: Tensor | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with torch's own ops, one after the other. The append is one index_copy_ a cache, as nothing here has to
    skip a slot: finding out would wait for the device."""
    q, k, v = reference(
        x,
        w_qkv,
        bias,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        **rest,
    )
    if key_cache is not None and value_cache is not None and slot_mapping is not None:
        key_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, k)
        value_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, v)
    return q, k, v


def allocate_out(inputs: Inputs) -> Inputs:
    q, k = (
        inputs["x"].new_empty((inputs["x"].shape[0], inputs[heads], inputs["head_dim"]))
        for heads in ("num_q_heads", "num_kv_heads")
    )
    return {"q_out": q, "k_out": k, "v_out": torch.empty_like(k)}


def _outputs(inputs: Inputs) -> tuple[int, int]:
    """Bytes of q, k and v together, and of k and v."""
    heads = inputs["num_q_heads"], 2 * inputs["num_kv_heads"]
    a_head = inputs["x"].shape[0] * inputs["head_dim"] * inputs["x"].element_size()
    return sum(heads) * a_head, heads[1] * a_head


def _table(inputs: Inputs) -> int:
    """Bytes of the cosines and sines of all tokens."""
    return 4 * inputs["x"].shape[0] * inputs["cos_sin_cache"].shape[1]


def bytes_moved(inputs: Inputs) -> int:
    """x, the weights, the table's rows and the indices in; q, k and v out, and k and v into the cache."""
    results, appended = _outputs(inputs)
    read = tensor_bytes(*(inputs[name] for name in ("x", "w_qkv", "norm_weight", "positions", "slot_mapping")))
    return read + _table(inputs) + results + appended


def unfused_bytes(inputs: Inputs) -> int:
    """Four kernels, if each were perfect: norm (x in and out), product, rotation of q and k, append of k and v."""
    results, appended = _outputs(inputs)
    rotated = results - appended // 2
    return bytes_moved(inputs) + 2 * tensor_bytes(inputs["x"]) + 2 * rotated + appended


def flops(inputs: Inputs) -> int:
    """The product; what is around it is a thousandth of it."""
    return 2 * inputs["x"].shape[0] * inputs["w_qkv"].numel()


SPEC = OpSpec(
    op="qkv_proj",
    shapes=(
        *((num_tokens, LLAMA_3_8B) for num_tokens in (1, 16, 64, 4096)),
        (1, SMOLLM2_135M),
    ),
    cpu_shapes=(*((num_tokens, LLAMA_3_8B) for num_tokens in (1, 64)), (1, SMOLLM2_135M)),
    make_inputs=make_inputs,
    fused=qkv_proj,
    unfused=unfused,
    reference=reference,
    allocate_out=allocate_out,
    bytes_moved=bytes_moved,
    unfused_bytes=unfused_bytes,
    unfused_launches=4,
    flops=flops,
    row_inputs=("x", "positions", "slot_mapping"),
    ceiling="read",
)
