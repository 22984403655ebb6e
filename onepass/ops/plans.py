"""Plans: what a call comes down to once its arguments are checked and its backend is chosen.

A model calls an op with the same shapes again and again. The checks, the Desc, the backend and its kernel depend on
the arguments' metadata and on the values that are no tensors, so an op works them out once for each combination it
meets and keeps the result: a plan, a function of the tensors. What depends on addresses beyond their alignment (an
overlap of memory) is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass import dispatch

Plan = Callable[..., None]
Tensors = tuple[Tensor | None, ...]

MAX_PLANS = 4096

_INDEX_DTYPES = (torch.int64, torch.int32)


class Plans:
    """The plans of one op.

    `make(aligned, values, tensors)` checks the call, raises what the op raises, and returns its plan. It may depend on
    the tensors' shapes, strides, dtypes and devices, on `values`, and on `aligned`: every tensor starts at a multiple
    of 16 bytes. Of addresses it may know nothing more. Integer tensors do not count for `aligned`: positions and slots
    are read one by one, and a row must not change its bits with the place of its position in memory.
    """

    def __init__(self, make: Callable[[bool, tuple[Any, ...], Tensors], Plan]) -> None:
        self._make = make
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def find(self, values: tuple[Any, ...], tensors: Tensors, loose: Tensors = ()) -> Plan:
        """The plan of a call, made at its first time. Fresh outputs are left out: they are as the inputs say.

        `loose` tensors, such as one number a row, may start anywhere: `aligned` says nothing of them. They follow
        the others in what `make` gets.
        """
        key: list[Any] = [dispatch.forced(), values]
        address_bits, wants_grad = 0, False
        try:
            for t in tensors:
                if t is None:
                    key.append(None)
                else:
                    dtype = t.dtype
                    if dtype not in _INDEX_DTYPES:
                        address_bits |= t.data_ptr()
                    wants_grad |= t.requires_grad
                    key += (t.shape, t.stride(), dtype, t.device)
            for t in loose:
                if t is None:
                    key.append(None)
                else:
                    wants_grad |= t.requires_grad
                    key += (t.shape, t.stride(), t.dtype, t.device)
        except AttributeError:
            self._make(False, values, tensors + loose)  # raises: one of them is no tensor
            raise
        if wants_grad and torch.is_grad_enabled():
            self._make(False, values, tensors + loose)  # raises: ops have no backward pass
        aligned = not address_bits & 15
        key.append(aligned)
        plan = self._plans.get(tuple(key))
        if plan is None:
            plan = self._make(aligned, values, tensors + loose)
            if len(self._plans) >= MAX_PLANS:  # an unusual caller has filled it with shapes
                self._plans.clear()
            self._plans[tuple(key)] = plan
        return plan
