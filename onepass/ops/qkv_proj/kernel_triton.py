"""qkv_proj in Triton: one kernel up to 16 tokens; above, torch's product between a norm kernel and one for the rest.

Few tokens: bytes: the weights once; x from the L2, once a program. Many tokens: the product is cuBLAS's; around it x
goes in and out once for the norm, and the product in and out once for everything after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from onepass.launch.triton import Features, Specialization, features, load, pointer, unsupported_device
from onepass.ops.qkv_proj.op import FEW_TOKENS, Call
from onepass.ops.qkv_proj.triton_around import after_kernel, norm_kernel
from onepass.ops.qkv_proj.triton_few import few_tokens_kernel

if TYPE_CHECKING:
    from onepass.ops.qkv_proj.op import Desc


PRODUCTS_APART = 4096
"""From so many tokens on q, k and v are three products, each where it will be, and what follows reads and writes less.
With fewer tokens one product fills the multiprocessors better than three."""

MANY_PROGRAMS = 4096
"""From here on programmatic dependent launch is left out: it hides the launch, and each program then starts later."""


def unsupported_reasons(desc: Desc) -> tuple[str, ...]:
    return unsupported_device(desc.device)


def specialize_few(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The kernel of up to 16 tokens, and what it is compiled for."""
    dtype, one = pointer(desc.dtype), desc.num_tokens == 1
    after = desc.q_norm_dtype is not None  # a kernel of its own follows
    rotary_dim = 0 if after else desc.rotary_dim
    cache = dtype if desc.has_cache and not after else "none"
    types = (
        *(dtype, dtype, pointer(desc.bias_dtype), pointer(desc.norm_weight_dtype if norms_in_place(desc) else None)),
        *("*fp32" if rotary_dim else "none", cache, cache),
        pointer(desc.position_dtype) if rotary_dim else "none",
        "*i64" if desc.has_cache and not after else "none",
        *(dtype, dtype, dtype),
        *(*("i64",) * 22, "fp32", "fp32"),
    )
    # Of the numbers: the strides of x, w and the table; those of q, k, v and of the caches.
    multiples = (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 17, 18, 19, *range(22, 34)) if desc.aligned else ()
    if desc.hidden_size % 16 == 0:
        multiples += (13,)
    pairs = 8
    wide = desc.dtype == torch.float32
    block, warps, stages = (512, 4, 1) if one else (32, 4, 2) if wide else (128, 2, 4)
    constants = (
        *(desc.num_q_heads, desc.num_kv_heads, desc.head_dim, rotary_dim, desc.interleaved),
        *(pairs, block, 1 if one else FEW_TOKENS, stages, desc.hidden_size % block == 0),
        *(features.ptx and desc.dtype != torch.float32, features.pdl),
    )
    special = Specialization(types, constants, multiples, warps, features.pdl, stages)
    return few_tokens_kernel, special


def norms_in_place(desc: Desc) -> bool:
    """Whether the kernel of few tokens norms x itself. In float16 x times the weight may overflow before it is divided
    by the root mean square; one token is multiplied in float32."""
    return desc.dtype != torch.float16 or desc.num_tokens == 1


def specialize_norm(desc: Desc, features: Features) -> tuple[Any, Specialization]:
    """The norm before a product, and what it is compiled for."""
    n = desc.hidden_size
    block = min(triton.next_power_of_2(n), 4096)
    chunks = -(-n // block)
    dtype = pointer(desc.dtype)
    types = (dtype, pointer(desc.norm_weight_dtype), dtype, "i64", "i64", "fp32", "fp32")
    multiples = (0, 1, 2, 4) if desc.aligned else (2,)
    multiples += (3,) if n % 16 == 0 else ()
    warps = 4 if n <= 4096 else 8 if n <= 16384 else 16
    pdl = features.pdl and desc.num_tokens < MANY_PROGRAMS
    constants = (block, chunks, n == block * chunks, features.ptx and desc.dtype != torch.float32, pdl)
    return norm_kernel, Specialization(types, constants, multiples, warps, pdl)


def _after_tile(desc: Desc) -> tuple[int, int]:
    """Tokens and heads of a program."""
    heads = min(8, triton.next_power_of_2(max(desc.num_q_heads, desc.num_kv_heads)))
    size = heads * triton.next_power_of_2(desc.head_dim)
    return 1 if desc.num_tokens <= 64 else max(1, 2048 // size), heads


def _stores_v(desc: Desc, in_place: bool, bias_done: bool) -> bool:
    return not in_place or (desc.bias_dtype is not None and not bias_done)


def _after_grid(desc: Desc, stores_v: bool) -> int:
    tokens, heads = _after_tile(desc)
    kv = -(-desc.num_kv_heads // heads)
    kinds = -(-desc.num_q_heads // heads) + kv * (2 if stores_v or desc.has_cache else 1)
    return -(-desc.num_tokens // tokens) * kinds


def specialize_after(
    desc: Desc, features: Features, in_place: bool, bias_done: bool = False
) -> tuple[Any, Specialization]:
    """What follows a product, and what it is compiled for. `in_place`: the product is where q, k and v will be."""
    dtype, rotary = pointer(desc.dtype), desc.rotary_dim
    cache = dtype if desc.has_cache else "none"
    types = (
        *(dtype, dtype, dtype, pointer(None if bias_done else desc.bias_dtype)),
        *(pointer(desc.q_norm_dtype), pointer(desc.k_norm_dtype), "*fp32" if rotary else "none", cache, cache),
        *(pointer(desc.position_dtype if rotary else None), "*i64" if desc.has_cache else "none"),
        *(dtype, dtype, dtype),
        *(*("i64",) * 25, "fp32", "fp32"),
    )
    multiples = (*range(9), 11, 12, 13, *range(18, 25), *range(27, 39)) if desc.aligned else ()
    tokens, heads = _after_tile(desc)
    stores_v = _stores_v(desc, in_place, bias_done)
    pdl = features.pdl and _after_grid(desc, stores_v) < MANY_PROGRAMS
    rest = desc.head_dim - rotary
    constants = (
        *(desc.num_q_heads, desc.num_kv_heads, desc.head_dim, rotary, desc.interleaved),
        *(triton.next_power_of_2(rotary // 2) if rotary else 0, triton.next_power_of_2(rest) if rest else 0),
        *(heads, tokens, stores_v, in_place, features.ptx and desc.dtype != torch.float32, pdl),
    )
    return after_kernel, Specialization(types, constants, multiples, 4, pdl)


def after_launcher(desc: Desc, in_place: bool, bias_done: bool = False) -> Callable[..., None]:
    """A function (call, tensors, strides of the inputs) that runs what follows a product."""
    launch = load(*specialize_after(desc, features(desc.device), in_place, bias_done), desc.device)
    grid, num_tokens = _after_grid(desc, _stores_v(desc, in_place, bias_done)), desc.num_tokens

    def run(call: Call, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]) -> None:
        sizes = (num_tokens, call.num_positions, call.page_size, call.num_slots)
        launch(grid, tensors, *sizes, *strides, *call[8:], call.qk_norm_eps, call.norm_weight_offset)

    return run


def _few_launcher(desc: Desc) -> Callable[..., None]:
    kernel, special = specialize_few(desc, features(desc.device))
    launch = load(kernel, special, desc.device)
    after = desc.q_norm_dtype is not None
    rotary, pairs = (0 if after else desc.rotary_dim), special.constants[5]
    blocks = -(-(rotary // 2) // pairs) + -(-(desc.head_dim - rotary) // (2 * pairs))
    grid = (desc.num_q_heads + 2 * desc.num_kv_heads) * blocks
    num_tokens, hidden_size = desc.num_tokens, desc.hidden_size

    def run(call: Call, tensors: tuple[Tensor | None, ...]) -> None:
        numbers = (num_tokens, hidden_size, *call[3:], call.norm_eps, call.norm_weight_offset)
        launch(grid, tensors, *numbers)

    return run


def prepare(desc: Desc) -> Callable[..., None]:
    return _prepare_few(desc) if desc.num_tokens <= FEW_TOKENS else _prepare_many(desc)


def _prepare_norm(desc: Desc) -> Callable[[Call, Tensor, Tensor], Tensor]:
    launch = load(*specialize_norm(desc, features(desc.device)), desc.device)
    grid, n = desc.num_tokens, desc.hidden_size

    def run(call: Call, x: Tensor, weight: Tensor) -> Tensor:
        normed = torch.empty((grid, n), dtype=x.dtype, device=x.device)
        launch(grid, (x, weight, normed), n, call.x, call.norm_eps, call.norm_weight_offset)
        return normed

    return run


def _prepare_few(desc: Desc) -> Callable[..., None]:
    product = _few_launcher(desc)
    norm = None if norms_in_place(desc) or desc.norm_weight_dtype is None else _prepare_norm(desc)
    after = None if desc.q_norm_dtype is None else after_launcher(desc, in_place=True, bias_done=True)

    def run(
        call: Call,
        x: Tensor,
        w_qkv: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        table: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        positions: Tensor | None,
        slots: Tensor | None,
        *outputs: Tensor,
    ) -> None:
        first = call
        if norm is not None:
            assert norm_weight is not None
            x, norm_weight = norm(call, x, norm_weight), None
            first = call._replace(x=x.shape[1])
        if after is None:
            product(first, (x, w_qkv, bias, norm_weight, table, key_cache, value_cache, positions, slots, *outputs))
            return
        product(first, (x, w_qkv, bias, norm_weight, *(None,) * 5, *outputs))
        inputs = (*outputs, None, q_norm, k_norm, table, key_cache, value_cache, positions, slots)
        strides = (call.q_token, call.k_token, call.v_token, call.q_head, call.k_head, call.v_head)
        after(call, (*inputs, *outputs), strides)

    return run


def _prepare_many(desc: Desc) -> Callable[..., None]:
    norm = None if desc.norm_weight_dtype is None else _prepare_norm(desc)
    apart = desc.num_tokens >= PRODUCTS_APART
    in_place = apart and desc.dense_heads
    after = after_launcher(desc, in_place)
    num_tokens, head_dim = desc.num_tokens, desc.head_dim
    features = (desc.num_q_heads + 2 * desc.num_kv_heads) * head_dim
    k_at = desc.num_q_heads * head_dim
    v_at = k_at + desc.num_kv_heads * head_dim

    def run(
        call: Call,
        x: Tensor,
        w_qkv: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        table: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        positions: Tensor | None,
        slots: Tensor | None,
        *outputs: Tensor,
    ) -> None:
        if norm is not None:
            assert norm_weight is not None
            x = norm(call, x, norm_weight)
        inputs: tuple[Tensor, ...]
        strides: tuple[int, ...]
        if apart:
            inputs = (
                outputs
                if in_place
                else tuple(torch.empty(out.shape, dtype=x.dtype, device=x.device) for out in outputs)
            )
            for to, rows in zip(inputs, (w_qkv[:k_at], w_qkv[k_at:v_at], w_qkv[v_at:]), strict=True):
                torch.mm(x, rows.t(), out=to.view(num_tokens, -1))
            strides = (*(t.stride(0) for t in inputs), *(t.stride(1) for t in inputs))
        else:
            qkv = torch.empty((num_tokens, features), dtype=x.dtype, device=x.device)
            torch.mm(x, w_qkv.t(), out=qkv)
            inputs = (qkv, qkv[:, k_at:], qkv[:, v_at:])
            strides = (features, features, features, head_dim, head_dim, head_dim)
        given = (bias, q_norm, k_norm, table, key_cache, value_cache, positions, slots)
        after(call, (*inputs, *given, *outputs), strides)

    return run
