"""Argument checks that ops share. Each raises before anything is written."""

from __future__ import annotations

from typing import Any

import torch

from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONAL_TENSOR = (type(None), torch.Tensor)
_FLOAT_NAMES = "float32, bfloat16 or float16"


def check_tensor(op: str, argument: str, value: torch.Tensor) -> None:
    """A dtype that ops take."""
    if value.dtype not in FLOAT_DTYPES:
        raise ArgumentTypeError(op, argument, _FLOAT_NAMES, value.dtype)


def raise_not_tensor(op: str, required: tuple[str, ...], **values: Any) -> None:
    """Name the argument that is no tensor (nor None, unless it is required). Ops test this inline: it is a hot path."""
    for argument, value in values.items():
        if not isinstance(value, torch.Tensor if argument in required else OPTIONAL_TENSOR):
            expected = "a torch.Tensor" if argument in required else "a torch.Tensor or None"
            raise ArgumentTypeError(op, argument, expected, type(value).__name__)


def check_vector(op: str, argument: str, value: torch.Tensor, x: torch.Tensor) -> None:
    """A per-column parameter: [N] on x's device, any float dtype."""
    check_tensor(op, argument, value)
    if value.shape != x.shape[-1:]:
        raise ArgumentValueError(op, argument, f"shape [{x.shape[-1]}], the last dimension of x", list(value.shape))
    if value.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of x, {x.device}", value.device)


def check_like(op: str, argument: str, value: torch.Tensor, x: torch.Tensor, name: str = "x") -> None:
    """A tensor of the shape, dtype and device of x, which the op calls `name`."""
    if value.dtype != x.dtype:
        raise ArgumentTypeError(op, argument, f"the dtype of {name}, {x.dtype}", value.dtype)
    if value.shape != x.shape:
        raise ArgumentValueError(op, argument, f"the shape of {name}, {list(x.shape)}", list(value.shape))
    if value.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of {name}, {x.device}", value.device)


def any_requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient is wanted through any of the tensors, in grad mode: ops have no backward pass."""
    return any(t is not None and t.requires_grad for t in tensors)


def raise_requires_grad(op: str, unfused: str, **tensors: torch.Tensor | None) -> None:
    """Name the first argument that requires grad, and what to call instead."""
    for argument, value in tensors.items():
        if value is not None and value.requires_grad:
            raise GradientsNotSupportedError(op, argument, unfused)
