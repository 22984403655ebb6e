"""What the tuner needs to know of layer_norm: its Triton kernel, with SiLU, a weight and a bias."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onepass.ops.layer_norm import config, kernel_triton
from onepass.ops.layer_norm.op import describe
from onepass.ops.norm_call import RowStrides
from onepass.ops.spec import Inputs
from onepass.ops.tunable import Tunable


def bind(chosen: config.Config, inputs: Inputs, out: Inputs) -> Callable[[], None]:
    """The kernel on contiguous tensors, without the op around it."""
    x, y = inputs["x"], out["out"]
    run = kernel_triton.prepare(describe(**inputs, **out), chosen)
    strides = RowStrides(x.stride(0), 0, y.stride(0), 0)
    return partial(run, strides, inputs["eps"], x, None, inputs["weight"], inputs["bias"], y, None)


TUNABLE = Tunable(
    op="layer_norm",
    backend="triton",
    heuristic=lambda n, dtype: config.heuristic(n, dtype.itemsize),
    candidates=lambda n, dtype: config.candidates(n, dtype.itemsize),
    bind=bind,
    sizes=(576, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384),
)
