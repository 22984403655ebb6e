"""Which config of row_config.py the layer_norm kernel takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onepass.ops.row_config import MAX_RESIDENT, WARP_BYTES, WARP_SIZE, Config, candidates, heuristic, is_valid
from onepass.ops.tuned import lookup

if TYPE_CHECKING:
    from onepass.ops.layer_norm.op import Desc

__all__ = ["MAX_RESIDENT", "WARP_BYTES", "WARP_SIZE", "Config", "candidates", "choose", "heuristic", "is_valid"]


def choose(desc: Desc) -> Config:
    """The tuned config where there is one, else the heuristic's."""
    n = desc.hidden_size
    tuned = None
    if desc.device.type == "cuda":
        tuned = lookup("layer_norm", "triton", desc.device, n, desc.dtype, lambda numbers: _tuned(numbers, n))
    return tuned or heuristic(n, desc.dtype.itemsize)


def _tuned(numbers: dict[str, int], hidden_size: int) -> Config | None:
    if set(numbers) != set(Config._fields):
        return None
    config = Config(**numbers)
    return config if is_valid(config, hidden_size) else None
