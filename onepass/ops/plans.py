"""Plans: what a call comes down to once its arguments are checked and its backend is chosen.

A model calls an op with the same shapes again and again. The checks, the Desc, the backend and its kernel depend on
the arguments' metadata alone, so an op works them out once for each metadata it meets and keeps the result: a plan, a
function of the tensors. What depends on addresses (alignment, overlap) is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Plan = Callable[..., None]
Metadata = tuple[Any, ...] | None

MAX_PLANS = 4096


def metadata(t: Tensor | None) -> Metadata:
    """All of a tensor that a plan may depend on, except its address."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


class Plans(dict[tuple[Any, ...], Plan]):
    """The plans of one op, by key; emptied when an unusual caller has filled it with shapes."""

    def keep(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan
