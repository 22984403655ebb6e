"""apply_rope on a GPU: offsets that need 64 bits, and slices of one buffer."""

from __future__ import annotations

import pytest
import torch
from cases import BF16
from cases.checks import assert_same_bits
from cases.rope_inputs import heads, positions, table

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def test_offsets_past_2_31() -> None:
    """524289 tokens of 32 heads, in place: the last ones as they are alone."""
    tokens = 524289
    q = torch.empty(tokens, 32, 128, dtype=BF16, device=CUDA)
    last = heads(CUDA, 700, 32, 128)
    q[-700:] = last
    k = torch.zeros(tokens, 1, 128, dtype=BF16, device=CUDA)
    at = positions(CUDA, tokens)
    onepass.apply_rope(q, k, table(CUDA, 128), at, q_out=q, k_out=k)
    expected = onepass.apply_rope(last, k[-700:], table(CUDA, 128), at[-700:])
    assert_same_bits((q[-700:],), expected[:1], "the last tokens")


def test_strides_past_2_31() -> None:
    """Few tokens, far apart."""
    memory = torch.empty(2**31 + 128, dtype=BF16, device=CUDA)
    q = memory.as_strided((3, 1, 128), (2**30, 128, 1))
    q.copy_(heads(CUDA, 3, 1, 128))
    k, cache, at = heads(CUDA, 3, 1, 128, seed=1), table(CUDA, 128), positions(CUDA, 3)
    expected = onepass.apply_rope(q.clone(), k, cache, at)
    assert_same_bits(onepass.apply_rope(q, k, cache, at, q_out=q), expected, "far apart")


@pytest.mark.parametrize("num_tokens", [1, 700])
def test_slices_of_one_buffer_are_turned_in_place(num_tokens: int) -> None:
    qkv = heads(CUDA, num_tokens, 8 * 64)
    before = qkv.clone()
    q, k = qkv[:, :256].unflatten(1, (4, 64)), qkv[:, 256:384].unflatten(1, (2, 64))
    cache, at = table(CUDA, 64), positions(CUDA, num_tokens)
    expected = onepass.apply_rope(q, k, cache, at)
    assert_same_bits(onepass.apply_rope(q, k, cache, at, q_out=q, k_out=k), expected, "in place")
    assert torch.equal(qkv[:, 384:], before[:, 384:])


def test_validate_names_the_position() -> None:
    at = torch.tensor([0, 600, 1], device=CUDA)
    with pytest.raises(ValueError, match="got 600 at token 1"):
        onepass.apply_rope(heads(CUDA, 3, 4, 64), heads(CUDA, 3, 2, 64), table(CUDA, 64), at, validate=True)
