"""What is special about qkv_proj on a GPU: the CUDA C++ kernel of few tokens, and caches past 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32, qkv_proj
from cases.checks import assert_same_bits
from cases.rope_inputs import LLAMA, SMOL

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def _cuda_runs() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    from onepass.launch.cuda import missing

    return not missing()


@pytest.mark.skipif(not _cuda_runs(), reason="needs an sm_90 GPU and cuda-core")
@pytest.mark.parametrize("model", [LLAMA, SMOL], ids=["llama", "smollm2"])
def test_one_token_has_the_bits_it_has_among_sixteen(model: qkv_proj.Model) -> None:
    """The CUDA kernel sums in one order up to 16 tokens, whether one product holds 8 tokens or two hold 16."""
    inputs = qkv_proj.make(CUDA, model, 4096, 16, bias=True, cache=False)
    with onepass.backend("cuda"):
        whole = onepass.qkv_proj(**inputs)
        for part in (slice(0, 1), slice(15, 16), slice(3, 11), slice(2, 14)):
            rows = {**inputs, **{name: inputs[name][part] for name in ("x", "positions")}}
            assert_same_bits(onepass.qkv_proj(**rows), tuple(w[part] for w in whole), f"tokens {part}")


@pytest.mark.skipif(not _cuda_runs(), reason="needs an sm_90 GPU and cuda-core")
def test_what_the_cuda_kernel_refuses_runs_on_triton() -> None:
    def backend(num_tokens: int, dtype: torch.dtype = BF16, hidden_size: int = 576) -> str | None:
        inputs = qkv_proj.make(CUDA, SMOL, hidden_size, num_tokens, dtype)
        return onepass.explain("qkv_proj", **inputs).backend

    assert backend(1) == backend(16) == "cuda"
    assert backend(17) == backend(1, FP16) == backend(1, FP32) == backend(1, hidden_size=577) == "triton"


@pytest.mark.parametrize("num_tokens", [2, 17])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_cache_past_2_31_elements(backend: str, num_tokens: int) -> None:
    if backend == "cuda" and (num_tokens > 16 or not _cuda_runs()):
        pytest.skip("not a case of the CUDA kernel")
    inputs = qkv_proj.make(CUDA, SMOL, 576, num_tokens)
    a_slot = SMOL.num_kv_heads * SMOL.head_dim
    num_pages = 2**31 // (a_slot * 16) + 2
    if torch.cuda.mem_get_info()[0] < 3 * num_pages * a_slot * 16 * 2:
        pytest.skip("too little memory")
    for name in qkv_proj.CACHES:
        inputs[name] = torch.zeros(num_pages, 16, SMOL.num_kv_heads, SMOL.head_dim, dtype=BF16, device=CUDA)
    last = num_pages * 16 - 1
    inputs["slot_mapping"][:2] = torch.tensor([last, last + 1], device=CUDA)
    with onepass.backend(backend):
        _, k, v = onepass.qkv_proj(**inputs)
    for name, values in (("key_cache", k), ("value_cache", v)):
        assert torch.equal(inputs[name][-1, -1], values[0])
        assert not bool(inputs[name][-1, :-1].any())
