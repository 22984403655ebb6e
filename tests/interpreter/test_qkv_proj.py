"""qkv_proj's way with very many tokens, in Triton's interpreter with few of them."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, checks, qkv_proj
from cases.rope_inputs import Model

import onepass
from onepass.ops.qkv_proj import kernel_triton

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model", [Model(4, 2, 32, 32), Model(3, 1, 7, 4)], ids=["32", "7"])
def test_three_products_in_place(model: Model, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_triton, "PRODUCTS_APART", 17)
    inputs = qkv_proj.make(CPU, model, 40, 19, BF16, bias=bias, qk_norm=True)
    with onepass.backend("triton"):
        results = checks.call(qkv_proj, inputs)
        checks.check_values(qkv_proj, inputs, results)
        checks.check_output_form(qkv_proj, inputs, results)
