"""onepass: fused kernels for LLM inference. Every byte passes through the chip once.

The ops and all that needs torch load when a name is first used, so that the command line starts at once. An op is
registered with PyTorch then: a program that only loads an exported graph with onepass's ops in it names them first,
as in `from onepass import layer_norm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onepass import errors
from onepass.dispatch import backend, explain
from onepass.version import VERSION as __version__

if TYPE_CHECKING:
    from onepass.ops.add_relu.op import add_relu
    from onepass.ops.append_kv.op import append_kv
    from onepass.ops.apply_rope.op import apply_rope
    from onepass.ops.cross_entropy.op import cross_entropy
    from onepass.ops.flash_attention.op import flash_attention, flash_attention_varlen
    from onepass.ops.gated_activation.op import (
        geglu,
        gelu_and_mul,
        gelu_tanh_and_mul,
        relu_and_mul,
        silu_and_mul,
        swiglu,
    )
    from onepass.ops.layer_norm.op import layer_norm, layer_norm_silu
    from onepass.ops.logsumexp.op import logsumexp
    from onepass.ops.merge_attention_states.op import merge_attention_states
    from onepass.ops.paged_attention.op import paged_attention
    from onepass.ops.qk_norm_rope.op import qk_norm_rope
    from onepass.ops.qkv_proj.op import qkv_proj
    from onepass.ops.rms_norm.op import fused_add_rms_norm, fused_add_rms_norm_, rms_norm
    from onepass.ops.rms_norm_rope.op import rms_norm_rope
    from onepass.ops.sample.op import sample
    from onepass.ops.softmax.op import softmax
    from onepass.ops.softmax_weighted_sum.op import softmax_weighted_sum
    from onepass.warming import warmup

__all__ = [
    "add_relu",
    "append_kv",
    "apply_rope",
    "backend",
    "cross_entropy",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "geglu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "layer_norm",
    "layer_norm_silu",
    "logsumexp",
    "merge_attention_states",
    "paged_attention",
    "qk_norm_rope",
    "qkv_proj",
    "relu_and_mul",
    "rms_norm",
    "rms_norm_rope",
    "sample",
    "silu_and_mul",
    "softmax",
    "softmax_weighted_sum",
    "swiglu",
    "warmup",
]

_LAZY = {
    "add_relu": "onepass.ops.add_relu.op",
    "append_kv": "onepass.ops.append_kv.op",
    "apply_rope": "onepass.ops.apply_rope.op",
    "cross_entropy": "onepass.ops.cross_entropy.op",
    "flash_attention": "onepass.ops.flash_attention.op",
    "flash_attention_varlen": "onepass.ops.flash_attention.op",
    "fused_add_rms_norm": "onepass.ops.rms_norm.op",
    "fused_add_rms_norm_": "onepass.ops.rms_norm.op",
    "geglu": "onepass.ops.gated_activation.op",
    "gelu_and_mul": "onepass.ops.gated_activation.op",
    "gelu_tanh_and_mul": "onepass.ops.gated_activation.op",
    "layer_norm": "onepass.ops.layer_norm.op",
    "layer_norm_silu": "onepass.ops.layer_norm.op",
    "logsumexp": "onepass.ops.logsumexp.op",
    "merge_attention_states": "onepass.ops.merge_attention_states.op",
    "paged_attention": "onepass.ops.paged_attention.op",
    "qk_norm_rope": "onepass.ops.qk_norm_rope.op",
    "qkv_proj": "onepass.ops.qkv_proj.op",
    "relu_and_mul": "onepass.ops.gated_activation.op",
    "rms_norm": "onepass.ops.rms_norm.op",
    "rms_norm_rope": "onepass.ops.rms_norm_rope.op",
    "sample": "onepass.ops.sample.op",
    "silu_and_mul": "onepass.ops.gated_activation.op",
    "softmax": "onepass.ops.softmax.op",
    "softmax_weighted_sum": "onepass.ops.softmax_weighted_sum.op",
    "swiglu": "onepass.ops.gated_activation.op",
    "warmup": "onepass.warming",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'onepass' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
