"""What child processes run; spawned processes import it by name."""

from __future__ import annotations

import torch

import onepass
from cases import BF16, normal


def norm_on(device_name: str) -> list[float]:
    """One row of a layer_norm, as numbers that any process can compare."""
    device = torch.device(device_name)
    x = normal(device, 5, 576, dtype=BF16)
    y = onepass.layer_norm(x, activation="silu")
    assert isinstance(y, torch.Tensor)
    return y[3].float().tolist()


def warm(shape: tuple[int, ...]) -> list[str | None]:
    """The backends that got ready for a shape."""
    return [w.backend for w in onepass.warmup("layer_norm", [shape], device="cpu", dtypes=[BF16])]
