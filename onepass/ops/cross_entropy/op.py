"""cross_entropy: the loss of logits against class indices, in one pass over the logits."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import any_requires_grad, check_tensor, raise_not_tensor, raise_requires_grad
from onepass.ops.cross_entropy.config import workspace_size
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import aligned_16, as_rows, copy_notes, row_stride, strides_aligned_16

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS = ("none", "mean", "sum")
_TARGET_DTYPES = (torch.int64, torch.int32)
_OP = "cross_entropy"


class Desc(NamedTuple):
    """What a cross_entropy kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    target_dtype: torch.dtype
    num_rows: int
    vocab_size: int
    reduction: str
    capped: bool
    """There is a softcap."""
    smooth: bool
    """There is label smoothing."""
    with_lse: bool
    aligned: bool
    """The logits' pointer and row stride are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class Numbers(NamedTuple):
    """What a kernel is called with beside tensors. Strides are in elements."""

    stride: int
    target_stride: int
    ignore_index: int
    label_smoothing: float
    softcap: float | None


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The cross entropy of logits with class indices, each logit read once; forward only, to score and for perplexity.

    A row's loss is lse - logits[target], lse = log(sum(exp(logits))). Its bits depend on the vocabulary's size, the
    dtype, the alignment of memory and the backend, never on the other rows. Arithmetic is in float32, and so are the
    results whatever the logits' dtype, as of `F.cross_entropy(logits.float(), target)`: a loss in bfloat16 would have
    three digits.

    A target outside the vocabulary, other than `ignore_index`, cannot be refused without waiting for the device: its
    row's loss is NaN, and with it a mean or a sum. As in torch, a row with a logit of inf or with no logit above -inf
    has loss NaN, and the mean of no rows is NaN.

    Args:
        logits: [..., vocab_size], float32, bfloat16 or float16, any row strides; other layouts are copied first. Rather
            than slice tokens off a batch, which may not leave one row stride, give them `ignore_index` as target.
        target: [...], int64 or int32, the class of each row.
        ignore_index: the target of rows that do not count: their loss is 0, and a mean leaves them out. Where their lse
            is not wanted and there are many rows, their logits are not read.
        label_smoothing: from 0 to 1, the share of the target that is spread over all classes.
        softcap: logits are softcap * tanh(logits / softcap), or themselves for None.
        reduction: "none", "mean" or "sum".
        return_lse: also return lse.

    Returns:
        The loss, float32: [...] for "none", else a scalar. With `return_lse` the pair (loss, lse), lse float32 [...].

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a shape, device or number is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and the logits require grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source of the sums that are put together: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if return_lse:
        return _cross_entropy_lse(logits, target, ignore_index, label_smoothing, softcap, reduction)  # type: ignore[no-any-return]
    return _cross_entropy(logits, target, ignore_index, label_smoothing, softcap, reduction)  # type: ignore[no-any-return]


def describe(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    _check(logits, target, ignore_index, label_smoothing, softcap, reduction)
    copied = tuple(name for name, t in _operands(logits, target).items() if row_stride(t) is None)
    aligned = "logits" in copied or aligned_16(logits)
    return _desc(logits, target, label_smoothing, softcap, reduction, return_lse, aligned, copied)


def _operands(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """As rows: those of the target have one element each."""
    return {"logits": logits, "target": target.unsqueeze(-1)}


def _check(logits: Any, target: Any, ignore_index: Any, label_smoothing: Any, softcap: Any, reduction: Any) -> None:
    if not (isinstance(logits, Tensor) and isinstance(target, Tensor)):
        raise_not_tensor(_OP, ("logits", "target"), logits=logits, target=target)
    if torch.is_grad_enabled() and any_requires_grad(logits):
        raise_requires_grad(_OP, "torch.nn.functional.cross_entropy", logits=logits)
    _check_numbers(ignore_index, label_smoothing, softcap)
    if reduction not in REDUCTIONS:
        raise ArgumentValueError(_OP, "reduction", "one of " + ", ".join(map(repr, REDUCTIONS)), repr(reduction))
    check_tensor(_OP, "logits", logits)
    if logits.ndim == 0:
        raise ArgumentValueError(_OP, "logits", "at least one dimension", "a scalar tensor")
    if target.dtype not in _TARGET_DTYPES:
        raise ArgumentTypeError(_OP, "target", "int64 or int32", target.dtype)
    if target.shape != logits.shape[:-1]:
        expected = f"shape {list(logits.shape[:-1])}, the leading dimensions of logits"
        raise ArgumentValueError(_OP, "target", expected, list(target.shape))
    if target.device != logits.device:
        raise ArgumentValueError(_OP, "target", f"the device of logits, {logits.device}", target.device)


def _check_numbers(ignore_index: Any, label_smoothing: Any, softcap: Any) -> None:
    if not isinstance(ignore_index, (int, torch.SymInt)):
        raise ArgumentTypeError(_OP, "ignore_index", "an integer", type(ignore_index).__name__)
    number = (float, int, torch.SymFloat)
    if not isinstance(label_smoothing, number):
        raise ArgumentTypeError(_OP, "label_smoothing", "a number", type(label_smoothing).__name__)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentValueError(_OP, "label_smoothing", "a number from 0 to 1", label_smoothing)
    if softcap is None:
        return
    if not isinstance(softcap, number):
        raise ArgumentTypeError(_OP, "softcap", "a number or None", type(softcap).__name__)
    if not 0.0 < softcap < float("inf"):
        raise ArgumentValueError(_OP, "softcap", "a finite number above 0, or None", softcap)


def _desc(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float,
    softcap: float | None,
    reduction: str,
    with_lse: bool,
    aligned: bool,
    copied: tuple[str, ...] = (),
) -> Desc:
    stride = logits.shape[-1] if "logits" in copied else row_stride(logits) or 0
    return Desc(
        logits.device,
        logits.dtype,
        target.dtype,
        target.numel(),
        logits.shape[-1],
        reduction,
        softcap is not None,
        bool(label_smoothing),
        with_lse,
        aligned and strides_aligned_16(logits.element_size(), (stride,)),
        copied,
    )


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    *arguments, with_lse = values
    logits, target = tensors
    _check(logits, target, *arguments)
    assert logits is not None
    assert target is not None
    ignore_index, label_smoothing, softcap, reduction = arguments
    if target.numel() == 0:
        return partial(_run_empty, reduction)
    stride, target_stride = (row_stride(t) for t in _operands(logits, target).values())
    if stride is None or target_stride is None:
        return partial(_run_on_copies, values)
    desc = _desc(logits, target, label_smoothing, softcap, reduction, with_lse, aligned)
    numbers = Numbers(stride, target_stride, ignore_index, label_smoothing, softcap)
    size = workspace_size(desc.num_rows, desc.vocab_size, desc.dtype.itemsize, desc.smooth)
    return partial(_run, dispatch.prepare(_OP, desc), numbers, size)


_plans = Plans(_make_plan)


def _run(
    run: Plan, numbers: Numbers, size: int, logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor | None
) -> None:
    run(numbers, logits, target, loss, lse, logits.new_empty(size, dtype=torch.float32))


def _run_empty(reduction: str, logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor | None) -> None:
    """No rows: the sum is 0, and the mean NaN, as torch's are."""
    loss.fill_(torch.nan if reduction == "mean" else 0.0)


def _run_on_copies(values: tuple[Any, ...], logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor | None) -> None:
    """The slower path of rows.py."""
    logits = as_rows(logits)
    if row_stride(target.unsqueeze(-1)) is None:
        target = target.contiguous()
    _plans.find(values, (logits,), (target,))(logits, target, loss, lse)


def _empty_loss(target: Tensor, reduction: str) -> Tensor:
    return torch.empty(target.shape if reduction == "none" else (), dtype=torch.float32, device=target.device)


def _empty_lse(target: Tensor) -> Tensor:
    return torch.empty(target.shape, dtype=torch.float32, device=target.device)


def _kernel(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, reduction: str
) -> Tensor:
    values = (ignore_index, label_smoothing, softcap, reduction, False)
    plan = _plans.find(values, (logits,), (target,))
    loss = _empty_loss(target, reduction)
    plan(logits, target, loss, None)
    return loss


def _kernel_lse(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, reduction: str
) -> tuple[Tensor, Tensor]:
    values = (ignore_index, label_smoothing, softcap, reduction, True)
    plan = _plans.find(values, (logits,), (target,))
    loss, lse = _empty_loss(target, reduction), _empty_lse(target)
    plan(logits, target, loss, lse)
    return loss, lse


def _fake(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, reduction: str
) -> Tensor:
    _check(logits, target, ignore_index, label_smoothing, softcap, reduction)
    return _empty_loss(target, reduction)


def _fake_lse(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, reduction: str
) -> tuple[Tensor, Tensor]:
    _check(logits, target, ignore_index, label_smoothing, softcap, reduction)
    return _empty_loss(target, reduction), _empty_lse(target)


_ARGUMENTS = "Tensor logits, Tensor target, int ignore_index, float label_smoothing, float? softcap, str reduction"
_cross_entropy = register(f"cross_entropy({_ARGUMENTS}) -> Tensor", _kernel, _fake, _check)
_cross_entropy_lse = register(f"cross_entropy_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _kernel_lse, _fake_lse, _check)
