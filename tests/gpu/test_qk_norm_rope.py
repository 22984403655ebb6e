"""qk_norm_rope on a GPU: outputs that are parts of qkv."""

from __future__ import annotations

import pytest
import torch
from cases.checks import assert_same_bits
from cases.qk_norm_rope import plain
from cases.rope_inputs import SMOL

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("num_tokens", [1, 700])
def test_outputs_that_are_parts_of_qkv(num_tokens: int) -> None:
    inputs = plain(SMOL, num_tokens=num_tokens)(CUDA)
    expected = tuple(t.clone() for t in onepass.qk_norm_rope(**inputs))
    q, k, v = inputs["qkv"].unflatten(1, (15, 64)).split((9, 3, 3), dim=1)
    results = onepass.qk_norm_rope(**inputs, q_out=q, k_out=k, v_out=v)
    assert_same_bits(results, expected, "in place")


def test_v_is_moved_bit_for_bit() -> None:
    """NaN that carries bits of its own, too."""
    inputs = plain(SMOL)(CUDA)
    inputs["qkv"].view(torch.int16)[:, 12 * 64 + 5 : 13 * 64] = -1  # every bit
    out = torch.empty(3, 3, 64, dtype=inputs["qkv"].dtype, device=CUDA)
    onepass.qk_norm_rope(**inputs, v_out=out)
    assert_same_bits((out,), (inputs["qkv"][:, 12 * 64 :].unflatten(1, (3, 64)),), "v")
