"""The CUDA C++ kernel of flash_attention compiled by NVRTC, without a GPU: registers, spills, products in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP16
from cases.compile_facts import nvidia_facts, sass

pytest.importorskip("triton", reason="its package brings the tool that reads a cubin")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from onepass.launch.cuda import compile_kernel
from onepass.ops.flash_attention import kernel_cuda
from onepass.ops.flash_attention.desc import Desc

REGISTERS = 65536
SHARED_LIMIT = 227 << 10

PLAIN: dict[str, Any] = {
    "device": torch.device("cuda", 0),
    "dtype": BF16,
    "batch": 2,
    "seqlen_q": 512,
    "seqlen_k": 512,
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "softmax_scale": 0.1,
    "left": -1,
    "right": 0,
    "softcap": None,
    "sinks_dtype": None,
    "index_dtype": None,
    "total_q": 1024,
    "total_k": 1024,
    "has_lse": True,
    "aligned": True,
    "far_rows": False,
    "copied": (),
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"head-dim-{d}": {"head_dim": d} for d in (8, 64, 72, 80, 96, 128, 256)},
    "not-causal": {"right": -1},
    "fp16": {"dtype": FP16, "sinks_dtype": FP16},
    "everything-64": {"head_dim": 64, "index_dtype": torch.int64, "sinks_dtype": BF16, "softcap": 30.0, "left": 5},
    "everything-128": {"index_dtype": torch.int32, "sinks_dtype": torch.float32, "softcap": 30.0, "left": 5},
    "everything-256": {"head_dim": 256, "index_dtype": torch.int32, "sinks_dtype": BF16, "softcap": 30.0, "left": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel(variant: str) -> None:
    special = kernel_cuda.specialize(Desc(**{**PLAIN, **VARIANTS[variant]}))
    cubin = bytes(compile_kernel(special, kernel_cuda.ARCH).code)
    facts = nvidia_facts(cubin, special.shared_bytes)
    assert facts.spilled_bytes == 0, facts
    # Groups of warps move registers between them: the producer's 24 or 32, what its consumers get beyond.
    assert facts.registers * special.threads <= REGISTERS, facts
    assert facts.registers == {512: 128, 384: 168}[special.threads], facts
    assert facts.shared_bytes <= SHARED_LIMIT, facts
    # Where the compiler cannot tell when a product's registers are read, it waits after every instruction.
    code = sass(cubin)
    assert code.count("HGMMA") >= 16
    assert code.count("WARPGROUP.DEPBAR") <= 4, "products are serialised"
