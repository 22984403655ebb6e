"""Registration of ops with `torch.library`, so that torch.compile, export and opcheck see them.

`Library.define` with one kernel for every device costs about 2.5 µs a call, a third of `custom_op`. The kernel
is registered for all devices at once: dispatch.py picks the backend, and says so when there is none.

Where nothing in the process watches or changes torch's calls, the kernel is called directly: torch's dispatcher would
cost as much as the rest of a decode-sized call, and do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("onepass", "DEF")

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset({*_TENSORS, type(None), bool, int, float, str})

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_functorch_level: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing_state: Callable[[], object] = torch._C._get_tracing_state


def register(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], check: Callable[..., None]
) -> Callable[..., Any]:
    """Define `torch.ops.onepass.<name>` from a schema, its kernel and its fake (shape-only) kernel.

    All three functions take the schema's arguments. A kernel returns fresh tensors only; an out-form is a schema that
    mutates its arguments and returns nothing. `check` raises what is wrong with a call; the kernel, too, checks a call
    that it sees for the first time.

    Returns the function that the public op calls with arguments of any type.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onepass::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.onepass, name).default

    def call(*args: Any) -> Any:
        if _direct(args):
            return kernel(*args)
        if not torch.compiler.is_compiling():  # the fake kernel checks what is compiled
            check(*args)
        return overload(*args)

    return call


def _direct(args: tuple[Any, ...]) -> bool:
    """Whether torch's dispatcher would only call the kernel: no compiler, tracer, mode, transform or profiler is at
    work, and the arguments are of the expected types (no subclass) and have memory."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, args))
        and type(args[0]) in _TENSORS
        and not args[0].is_meta
        and not _dispatch_modes()
        and not _function_modes()
        and _functorch_level() is None
        and _tracing_state() is None
        and not torch.autograd._profiler_enabled()
    )
