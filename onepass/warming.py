"""Compiling ahead of the first call."""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError, UnknownNameError
from onepass.launch.device import default_device
from onepass.ops import spec as specs
from onepass.ops.spec import Inputs, OpSpec
from onepass.progress import progress_bar

BAR_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class Warmed:
    """What `warmup` got ready, and the seconds that took."""

    op: str
    backend: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    seconds: float

    def __str__(self) -> str:
        size, dtype = "×".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"{self.op} {size} {dtype}: {self.backend}, {self.seconds:.2f} s"


def warmup(
    op: str | Callable[..., Any],
    shapes: Iterable[Sequence[int]],
    *,
    dtypes: Iterable[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
    **arguments: Any,
) -> list[Warmed]:
    """Compile and load the kernels that calls of these shapes need, so that the first such call is fast.

    Each shape is called once with fresh outputs and once with `out=`, on random inputs; what an earlier process
    compiled comes from the cache folder. Ends when the device is done.

    A call is the op with all tensors that it has (for `layer_norm` x, weight and bias) and its own defaults
    otherwise. `arguments` are more of its arguments, or others: `activation="gelu"`, `bias=None`. A function in
    place of a tensor is called with the first tensor: `residual=torch.zeros_like`.

    Args:
        op: an op's name, such as "layer_norm", or a public function, or its name.
        shapes: shapes of the first tensor.
        dtypes: dtypes of all tensors; by default bfloat16 on a GPU, float32 and bfloat16 on a CPU.
        device: by default the GPU, if there is one, else the CPU.
        progress: called with a text before each step. By default a bar on the terminal, if it takes over two seconds.
        arguments: of the op, by name.

    Returns:
        One `Warmed` for each shape and dtype.

    Raises:
        UnknownNameError: no op has this name, or the op has no such argument.
        ArgumentTypeError: a shape is no sequence of integers, or a dtype is none that the op takes (a TypeError).
        ArgumentValueError: a size is negative, or torch cannot use the device (a ValueError).
        NoBackendError: no backend can run the calls.
    """
    name = dispatch.op_name(op)
    spec = specs.load(name)
    function = op if callable(op) else dispatch.public_function(op) or spec.fused
    target = _device(device)
    sizes = _shapes(shapes)
    wanted = _dtypes(dtypes, spec, target)
    parameters = tuple(inspect.signature(function).parameters)
    for argument in arguments:
        if argument not in parameters:
            raise UnknownNameError(f"argument of {name}", argument, parameters)
    warmed = []
    with progress_bar(enabled=progress is None, after_seconds=BAR_AFTER_SECONDS) as (advance, set_total):
        set_total(len(sizes) * len(wanted))
        for shape in sizes:
            for dtype in wanted:
                (progress or advance)(f"{name} {'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}")
                inputs = _inputs(spec, function, shape, dtype, target, arguments)
                outputs = {argument: t for argument, t in spec.allocate_out(inputs).items() if argument in parameters}
                with torch.no_grad():
                    start = time.perf_counter()
                    function(**inputs)
                    function(**{**outputs, **inputs})
                    seconds = time.perf_counter() - start
                    backend = dispatch.explain(op, **inputs).backend
                warmed.append(Warmed(name, backend, shape, dtype, seconds))
    if target.type == "cuda":
        torch.cuda.synchronize(target)
    return warmed


def _inputs(
    spec: OpSpec,
    function: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    arguments: dict[str, Any],
) -> Inputs:
    """The tensors of the op's spec, its own defaults for the rest, and over them what the caller said."""
    make_inputs = spec.form_inputs.get(getattr(function, "__name__", ""), spec.make_inputs)
    drawn = make_inputs(shape, dtype, device, 0)
    first = next(value for value in drawn.values() if isinstance(value, torch.Tensor))
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    inputs = {
        name: value
        for name, value in drawn.items()
        if name in defaults and (isinstance(value, torch.Tensor) or defaults[name] is inspect.Parameter.empty)
    }
    return inputs | {name: value(first) if callable(value) else value for name, value in arguments.items()}


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return default_device()
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # what torch raises for a device that is not there
        why = str(error).strip().splitlines()[0]
        raise ArgumentValueError(
            "warmup", "device", "a device that torch can use here", f"{device!r}: {why}"
        ) from error
    return found


def _shapes(shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    expected = "a list of shapes, such as [(1, 4096)]"
    try:
        sizes = [tuple(operator.index(n) for n in shape) for shape in shapes]
    except TypeError as error:
        raise ArgumentTypeError("warmup", "shapes", expected, repr(shapes)) from error
    for shape in sizes:
        if not shape or min(shape) < 0:
            raise ArgumentValueError("warmup", "shapes", f"{expected}, no size below 0", repr(shape))
    return sizes


def _dtypes(dtypes: Iterable[torch.dtype] | None, spec: OpSpec, device: torch.device) -> tuple[torch.dtype, ...]:
    if dtypes is None:
        return (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    expected = "a list of dtypes from " + ", ".join(str(dtype) for dtype in spec.dtypes)
    if isinstance(dtypes, (torch.dtype, str)):
        raise ArgumentTypeError("warmup", "dtypes", expected, repr(dtypes))
    wanted = tuple(dict.fromkeys(dtypes))
    for dtype in wanted:
        if dtype not in spec.dtypes:
            raise ArgumentTypeError("warmup", "dtypes", expected, repr(dtype))
    return wanted
