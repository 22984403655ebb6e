"""Peers are right before they are compared with: the plain Triton kernel in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from onepass.bench.check import Truth
from onepass.bench.peers.plain_triton_layer_norm import layer_norm_silu
from onepass.ops.layer_norm.spec import SPEC

for shape in ((3, 17), (2, 2, 768), (2, 5000)):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = SPEC.make_inputs(shape, dtype, torch.device("cpu"), 0)
        result = layer_norm_silu(inputs["x"], inputs["weight"], inputs["bias"], inputs["eps"])
        verdict = Truth(SPEC, inputs).judge(result)
        assert verdict.ok, (shape, dtype, verdict)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_plain_triton_kernel_is_right() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
