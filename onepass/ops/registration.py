"""Registration of ops with `torch.library`, so that torch.compile, export and opcheck see them.

`Library.define` with one kernel for every device costs about 2.5 µs a call, a third of `custom_op`. The kernel
is registered for all devices at once: dispatch.py picks the backend, and says so when there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("onepass", "DEF")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `torch.ops.onepass.<name>` from a schema, its kernel and its fake (shape-only) kernel.

    Returns the op overload to call. A kernel returns fresh tensors only; an out-form is a schema that mutates
    its arguments and returns nothing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onepass::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.onepass, name).default
