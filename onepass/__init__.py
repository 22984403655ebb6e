"""onepass: fused kernels for LLM inference. Every byte passes through the chip once."""

from __future__ import annotations

from onepass.dispatch import backend, explain
from onepass.ops.add_relu.op import add_relu
from onepass.ops.layer_norm.op import layer_norm, layer_norm_silu
from onepass.version import VERSION as __version__



__all__ = ["add_relu", "backend", "explain", "layer_norm", "layer_norm_silu"]
