"""The only place that picks a backend.

An op's backends are tried in the order of `TABLE`; the first one with no reason to refuse runs. A backend is
the module `onepass.ops.<op>.kernel_<backend>` (the reference: `onepass.ops.<op>.reference`), imported on first
use, with two functions:

- `unsupported_reasons(desc) -> tuple[str, ...]`: empty when it can run the call;
- `prepare(desc)`: compiles and loads what the call needs, and returns the function that runs it. What that takes
  is the op's own business.

`desc` is the op's `Desc`: a NamedTuple of what a kernel is chosen by (device, dtypes, sizes), never tensors.
"""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from onepass import settings
from onepass.errors import NoBackendError, UnknownNameError

TABLE: dict[str, tuple[str, ...]] = {
    "layer_norm": ("cuda", "triton", "cpu", "reference"),
    "add_relu": ("triton", "cpu", "reference"),
    "rms_norm": ("triton", "cpu", "reference"),
    "gated_activation": ("triton", "cpu", "reference"),
    "softmax": ("cuda", "triton", "cpu", "reference"),
    "logsumexp": ("triton", "cpu", "reference"),
    "softmax_weighted_sum": ("triton", "cpu", "reference"),
    "sample": ("cuda", "triton", "cpu", "reference"),
    "apply_rope": ("triton", "cpu", "reference"),
    "rms_norm_rope": ("triton", "cpu", "reference"),
    "qk_norm_rope": ("triton", "cpu", "reference"),
    "qkv_proj": ("cuda", "triton", "cpu", "reference"),
    "cross_entropy": ("triton", "cpu", "reference"),
    "flash_attention": ("cuda", "triton", "cpu", "reference"),
    "append_kv": ("triton", "cpu", "reference"),
    "merge_attention_states": ("triton", "cpu", "reference"),
    "paged_attention": ("triton", "cpu", "reference"),
}

FORMS: dict[str, str] = {
    "layer_norm_silu": "layer_norm",
    "fused_add_rms_norm": "rms_norm",
    "fused_add_rms_norm_": "rms_norm",
    "silu_and_mul": "gated_activation",
    "gelu_and_mul": "gated_activation",
    "gelu_tanh_and_mul": "gated_activation",
    "relu_and_mul": "gated_activation",
    "swiglu": "gated_activation",
    "geglu": "gated_activation",
    "flash_attention_varlen": "flash_attention",
}
"""Other public functions of an op, by name. Where one takes other arguments than the op's `describe`, its own stands
beside that, named `describe_<function>`."""

BACKENDS = ("cuda", "triton", "cpu", "reference")

REFERENCE_REASON = "runs only when asked for: with onepass.backend('reference')"

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("onepass_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend for every op called inside the `with` block, in this thread or task.

    An op that the backend cannot run then raises `NoBackendError` with the reasons; nothing else is tried. Around a
    compiled function it works; inside one, Dynamo does not trace it.

    Raises:
        UnknownNameError: no backend has this name.
    """
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The backend forced by `with backend(...)`, else by `ONEPASS_BACKEND`, else None."""
    name = _forced.get()
    if name is None:
        name = settings.forced_backend()
        if name is not None and name not in BACKENDS:
            raise UnknownNameError("backend in ONEPASS_BACKEND", name, BACKENDS)
    return name


def prepare(op: str, desc: Any) -> Callable[..., None]:
    """The function that runs `op` for `desc`, from the first backend that can.

    Raises:
        NoBackendError: none can; the message lists every backend's reasons.
    """
    reasons = {}
    for name in TABLE[op]:
        reasons[name] = _reasons_of(op, name, desc)
        if not reasons[name]:
            return _module(op, name).prepare(desc)  # type: ignore[no-any-return]
    lines = [f"no backend of '{op}' can run this call:"]
    lines += [f"  {name}: {'; '.join(why_not)}" for name, why_not in reasons.items()]
    raise NoBackendError("\n".join(lines))


def _reasons_of(op: str, backend_name: str, desc: Any) -> tuple[str, ...]:
    """Why this backend does not run the call; empty when it does. Imports a backend only to ask it."""
    wanted = forced()
    if wanted is not None and wanted != backend_name:
        return (f"the backend '{wanted}' is forced",)
    if backend_name == "reference" and wanted is None:
        return (REFERENCE_REASON,)
    try:
        module = _module(op, backend_name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "onepass"):
            raise
        return (f"it needs the package '{package}', which is not installed",)
    return tuple(module.unsupported_reasons(desc))


def _module(op: str, backend_name: str) -> Any:
    file = "reference" if backend_name == "reference" else f"kernel_{backend_name}"
    return importlib.import_module(f"onepass.ops.{op}.{file}")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the backend that runs (None if none can), and why each other does not."""

    op: str
    backend: str | None
    reasons: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: runs on '{self.backend}'" if self.backend else f"{self.op}: no backend can run this call"]
        for name, why_not in self.reasons.items():
            lines.append(f"  {name}: {'; '.join(why_not) if why_not else 'can run it'}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def op_name(op: str | Callable[..., Any]) -> str:
    """The name of an op, also from one of its other public functions, such as `layer_norm_silu`, or that one's name.

    Raises:
        UnknownNameError: no op has this name.
    """
    module = getattr(op, "__module__", None) or ""
    name = module.split(".")[2] if module.startswith("onepass.ops.") else _function_name(op)
    name = FORMS.get(name, name)
    if name not in TABLE:
        raise UnknownNameError("op", name, (*TABLE, *FORMS))
    return name


def public_function(op: str) -> Callable[..., Any] | None:
    """The function that `FORMS` names `op`; None for the name of an op."""
    return getattr(_op_module(FORMS[op]), op) if op in FORMS else None


def _op_module(name: str) -> Any:
    return importlib.import_module(f"onepass.ops.{name}.op")


def _function_name(op: str | Callable[..., Any]) -> str:
    return str(getattr(op, "__name__", op))


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run `op(*args, **kwargs)`, and why the others would not. Runs nothing.

    `op` is an op's name ("layer_norm") or a public function, or its name. The arguments are the op's own; wrong ones
    raise what the op itself would raise. `print()` shows the explanation as text.

    Raises:
        UnknownNameError: no op has this name.
    """
    name = op_name(op)
    module = _op_module(name)
    describe = getattr(module, f"describe_{_function_name(op)}", module.describe)
    desc = describe(*args, **kwargs)
    reasons = {b: _reasons_of(name, b, desc) for b in TABLE[name]}
    chosen = next((b for b, why_not in reasons.items() if not why_not), None)
    return Explanation(name, chosen, reasons, desc.notes())
