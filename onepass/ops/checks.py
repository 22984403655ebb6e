"""Argument checks that ops share. Each raises before anything is written."""

from __future__ import annotations

from typing import Any

import torch

from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT_NAMES = "float32, bfloat16 or float16"


def check_tensor(op: str, argument: str, value: Any) -> None:
    """A tensor of a dtype that ops take."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(op, argument, "a torch.Tensor", type(value).__name__)
    if value.dtype not in FLOAT_DTYPES:
        raise ArgumentTypeError(op, argument, _FLOAT_NAMES, value.dtype)


def check_same_device(op: str, argument: str, value: torch.Tensor, x: torch.Tensor) -> None:
    if value.device != x.device:
        raise ArgumentValueError(op, argument, f"the device of x, {x.device}", value.device)


def check_vector(op: str, argument: str, value: Any, x: torch.Tensor) -> None:
    """A per-column parameter: [N] on x's device, any float dtype."""
    check_tensor(op, argument, value)
    if value.ndim != 1 or value.shape[0] != x.shape[-1]:
        raise ArgumentValueError(op, argument, f"shape [{x.shape[-1]}], the last dimension of x", list(value.shape))
    check_same_device(op, argument, value, x)


def check_like(op: str, argument: str, value: Any, x: torch.Tensor) -> None:
    """A tensor of x's shape, dtype and device."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(op, argument, "a torch.Tensor", type(value).__name__)
    if value.dtype != x.dtype:
        raise ArgumentTypeError(op, argument, f"the dtype of x, {x.dtype}", value.dtype)
    if value.shape != x.shape:
        raise ArgumentValueError(op, argument, f"the shape of x, {list(x.shape)}", list(value.shape))
    check_same_device(op, argument, value, x)


def check_no_grad(op: str, unfused: str, **tensors: torch.Tensor | None) -> None:
    """No gradient is wanted: ops have no backward pass."""
    if torch.is_grad_enabled():
        for argument, value in tensors.items():
            if value is not None and value.requires_grad:
                raise GradientsNotSupportedError(op, argument, unfused)
