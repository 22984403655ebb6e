"""cross_entropy on a GPU: what tests/gpu/test_ops.py does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, checks, cross_entropy, normal

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)


def test_batch_sizes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """N15: up to a block of rows one set of kernels serves every batch size."""
    from triton.compiler import CompiledKernel

    x, target = normal(CUDA, 100, 1024, dtype=BF16), torch.arange(100, device=CUDA)
    onepass.cross_entropy(x[:2], target[:2])
    created = []
    original = CompiledKernel.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledKernel, "__init__", counting)
    for num_tokens in (1, 3, 16, 17, 32, 100):
        onepass.cross_entropy(x[:num_tokens], target[:num_tokens])
    assert not created


def test_offsets_past_2_31() -> None:
    """N1: 17000 rows of 128256, and rows further apart than they are long."""
    x = torch.randn(1000, 128256, device=CUDA).mul_(2.0).to(BF16).repeat(17, 1)
    target = torch.arange(17000, device=CUDA)
    some = torch.tensor([0, 5, 16743, 16744, 16745, 16999], device=CUDA)
    for logits in (x, x[:, :64000]):
        inputs = {"logits": logits[some], "target": target[some], "reduction": "none", "return_lse": True}
        loss, lse = onepass.cross_entropy(logits, target, reduction="none", return_lse=True)
        checks.check_values(cross_entropy, inputs, (loss[some], lse[some]))
        torch.testing.assert_close(onepass.cross_entropy(logits, target), loss.mean())


def test_nothing_waits_for_the_device() -> None:
    """Neither a target outside nor one that is ignored makes the host wait."""
    x, target = normal(CUDA, 200, 1024, dtype=BF16), torch.arange(200, device=CUDA)
    target[7], target[8] = 5000, -100
    onepass.cross_entropy(x, target)
    with torch.cuda.device(CUDA):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = onepass.cross_entropy(x, target, reduction="none")
            mean = onepass.cross_entropy(x, target)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan().nonzero().tolist() == [[7]]
    assert bool(mean.isnan())
