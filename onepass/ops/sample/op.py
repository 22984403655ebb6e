"""sample: one token a row of logits, by temperature, top-k, top-p and min-p, in one kernel and without a sort."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import dispatch
from onepass.errors import ArgumentTypeError, ArgumentValueError
from onepass.ops.checks import any_requires_grad, check_tensor, raise_not_tensor, raise_requires_grad
from onepass.ops.plans import Plan, Plans, Tensors
from onepass.ops.registration import register
from onepass.ops.rows import as_rows, copy_notes, row_stride, strides_aligned_16


class Desc(NamedTuple):
    """What a sampling kernel is chosen by."""

    device: torch.device
    dtype: torch.dtype
    num_rows: int
    vocab_size: int
    top_k_dtype: torch.dtype
    """int32 or int64; int64 where top_k is no tensor."""
    aligned: bool
    """The pointer and the row stride of the logits are multiples of 16 bytes."""
    copied: tuple[str, ...]
    """Arguments that take the slower path of rows.py."""

    def notes(self) -> tuple[str, ...]:
        return copy_notes(self.copied, self.aligned)


class Parameters(NamedTuple):
    """Tensors hold one number for all rows or one for each; where one is None the number of the same name counts."""

    temperatures: Tensor | None
    top_ks: Tensor | None
    top_ps: Tensor | None
    min_ps: Tensor | None
    seeds: Tensor | None
    offsets: Tensor | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    offset: int

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:6]

    def numbers(self) -> tuple[Any, ...]:
        return self[6:]

    def steps(self) -> tuple[int, ...]:
        """For each tensor how far a row's number lies from the one before: 1, or 0 where all rows share one."""
        return tuple([0 if t is None or t.numel() == 1 else 1 for t in self[:6]])

    @property
    def counts_rows(self) -> bool:
        """Whether the row's number is part of the counter of its random numbers: rows share a seed."""
        return self.seeds is None or self.seeds.numel() == 1


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draw one token a row.

    Token i has the weight exp((logits[i] - max) / temperature). Tokens are ranked by weight, the lowest index first
    among equals. Kept are the first `top_k`; of these, those with less than `top_p` of the kept weight ranked before
    them, and always the first; of these, those with at least `min_p` of the largest weight. One of them is drawn by
    its weight: the first index where the running sum of kept weights, in the order of indices, exceeds u times their
    sum. u has 64 bits, from Philox4x32-10 with the key `seed` and the counter (row, offset).

    Weights are fixed-point numbers of 40 bits after the point, and all sums are exact: a row's result does not depend
    on the other rows, and backends agree. Logits are float32 differences to the largest; weights err by 2^-22 of
    themselves, and those below 2^-40 of the largest are 0. Weights closer than that count as equal. So a draw differs
    from exact arithmetic only where u, or a limit, is that near to a step of the distribution.

    Each parameter is a number, or a tensor on the device of the logits with one element or one for each row (the
    shape of `logits` without its last dimension). Tensors are read when the kernel runs and cannot be checked:
    values outside of what is said here give no error, see below.

    Args:
        logits: [..., vocab_size], float32, bfloat16 or float16, any row strides; other layouts are copied first.
            NaN counts as -inf, a token that is never drawn.
        temperature: at least 0 and finite; tensor: float32. 0 takes the largest logit, the lowest index of equals. In
            a tensor, a row whose temperature is negative, infinite or NaN is not valid.
        top_k: tensor: int32 or int64. None, 0, -1 or more than vocab_size is no limit; so is any negative number in
            a tensor. 1 is the largest logit, as temperature 0.
        top_p: 0 to 1; tensor: float32. None or 1 is no limit. In a tensor, 1 and more is no limit, and below 0 or NaN
            is 0.
        min_p: 0 to 1; tensor: float32. None or 0 is no limit. In a tensor, more than 1 is 1, and NaN is 0.
        seed: 64 bits; tensor: int64. With one seed for each row, the row's number is left out of the counter: a row
            then draws the same wherever it stands. None takes a seed from torch's default generator of the logits'
            device, by a kernel of its own and without synchronisation; a captured CUDA graph takes a fresh one at
            each replay.
        offset: 64 bits; tensor: int64. None is 0. Another offset gives other numbers, independent of all others.
        return_valid: also return where a token could be drawn.

    Returns:
        ids, int64, the shape of `logits` without its last dimension; with `return_valid` the pair (ids, valid), valid
        being bool. A row with nothing to draw (every logit is -inf or NaN) has id 0 and valid False.

    Raises:
        ArgumentTypeError: a dtype or type is wrong (a TypeError).
        ArgumentValueError: a number, shape or device is wrong (a ValueError).
        GradientsNotSupportedError: grad mode is on and an input requires grad (a NotImplementedError).
        NoBackendError: no backend can run the call.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p); Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2025; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox).
    """
    if seed is None:
        _check_tensor("logits", logits)
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=logits.device)
    ids, valid = _sample(logits, *_parameters(temperature, top_k, top_p, min_p, seed, offset))
    return (ids, valid) if return_valid else ids


def describe(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Desc:
    """The Desc of a call, with the op's own checks; runs nothing."""
    p = _parameters(temperature, top_k, top_p, min_p, seed, offset)
    _check(logits, *p)
    stride = row_stride(logits)
    aligned = not logits.data_ptr() & 15 if stride is not None else True
    return _desc(logits, p.top_ks, aligned, stride, () if stride is not None else ("logits",))


def _parameters(temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, offset: Any) -> Parameters:
    """Each parameter as a tensor or None, and a number; nothing is checked."""
    given = (temperature, top_k, top_p, min_p, seed, offset)
    defaults = (1.0, 0, 1.0, 0.0, 0, 0)
    tensors = [value if isinstance(value, Tensor) else None for value in given]
    numbers = [
        default if value is None or isinstance(value, Tensor) else value
        for value, default in zip(given, defaults, strict=True)
    ]
    return Parameters(*tensors, *numbers)  # type: ignore[arg-type]


_UNFUSED = "torch.multinomial(torch.softmax(logits / temperature, -1), 1)"
_TENSOR_DTYPES = {
    "temperature": (torch.float32,),
    "top_k": (torch.int64, torch.int32),
    "top_p": (torch.float32,),
    "min_p": (torch.float32,),
    "seed": (torch.int64,),
    "offset": (torch.int64,),
}
_RANGES = {
    "temperature": (0.0, math.inf, "a finite number, at least 0"),
    "top_k": (-1, 2**63, "-1, 0 (both no limit) or a positive number"),
    "top_p": (0.0, 1.0, "a number from 0 to 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "seed": (-(2**63), 2**63, "an int64"),
    "offset": (-(2**63), 2**63, "an int64"),
}


def _check_tensor(argument: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise_not_tensor("sample", (argument,), **{argument: value})


def _check(logits: Any, *parameters: Any) -> None:
    _check_tensor("logits", logits)
    _check_numbers(Parameters(*parameters).numbers())
    _check_tensors(logits, *Parameters(*parameters).tensors())


def _check_numbers(numbers: tuple[Any, ...]) -> None:
    for (argument, (low, high, expected)), value in zip(_RANGES.items(), numbers, strict=True):
        whole = isinstance(low, int)
        if not isinstance(value, (int, torch.SymInt) if whole else (float, int, torch.SymFloat, torch.SymInt)):
            kind = "an int" if whole else "a number"
            raise ArgumentTypeError("sample", argument, f"{kind}, a tensor or None", type(value).__name__)
        if not low <= value or value > high or (value == high and argument not in ("top_p", "min_p")):
            raise ArgumentValueError("sample", argument, expected, value)


def _check_tensors(logits: Tensor, *tensors: Any) -> None:
    named = dict(zip(_TENSOR_DTYPES, tensors, strict=True))
    if torch.is_grad_enabled() and any_requires_grad(logits, *tensors):
        raise_requires_grad("sample", _UNFUSED, logits=logits, **named)
    check_tensor("sample", "logits", logits)
    if logits.ndim == 0:
        raise ArgumentValueError("sample", "logits", "at least one dimension", "a scalar tensor")
    for argument, value in named.items():
        if value is None:
            continue
        dtypes = _TENSOR_DTYPES[argument]
        if value.dtype not in dtypes:
            raise ArgumentTypeError("sample", argument, " or ".join(map(str, dtypes)), value.dtype)
        if value.numel() != 1 and value.shape != logits.shape[:-1]:
            expected = f"one element, or the shape {list(logits.shape[:-1])} of the rows"
            raise ArgumentValueError("sample", argument, expected, list(value.shape))
        if value.device != logits.device:
            raise ArgumentValueError("sample", argument, f"the device of the logits, {logits.device}", value.device)


def _desc(logits: Tensor, top_ks: Tensor | None, aligned: bool, stride: int | None, copied: tuple[str, ...]) -> Desc:
    vocab_size = logits.shape[-1]
    num_rows = logits.numel() // vocab_size if vocab_size else 0
    # The stride of a single row means nothing.
    strides = [vocab_size if stride is None else stride] if num_rows > 1 else []
    aligned = aligned and strides_aligned_16(logits.element_size(), strides)
    top_k_dtype = torch.int64 if top_ks is None else top_ks.dtype
    return Desc(logits.device, logits.dtype, num_rows, vocab_size, top_k_dtype, aligned, copied)


def _make_plan(aligned: bool, values: tuple[Any, ...], tensors: Tensors) -> Plan:
    logits, *parameters = tensors
    assert logits is not None
    _check_tensors(logits, *parameters)
    if logits.numel() == 0:
        return _nothing_to_draw
    stride = row_stride(logits)
    if stride is None or not all(t is None or t.is_contiguous() for t in parameters):
        return _run_on_copies
    desc = _desc(logits, parameters[1], aligned, stride, ())
    return partial(dispatch.prepare("sample", desc), stride if desc.num_rows > 1 else 0)


_plans = Plans(_make_plan)


def _nothing_to_draw(p: Parameters, logits: Tensor, ids: Tensor, valid: Tensor) -> None:
    """No rows, or no tokens."""
    ids.zero_()
    valid.zero_()


def _run_on_copies(p: Parameters, logits: Tensor, ids: Tensor, valid: Tensor) -> None:
    """The slower path of rows.py."""
    logits = as_rows(logits)
    tensors = tuple(None if t is None else t.contiguous() for t in p.tensors())
    p = Parameters(*tensors, *p.numbers())  # type: ignore[arg-type]
    _plans.find((), (logits,), tensors)(p, logits, ids, valid)


def _kernel(logits: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    p = Parameters(*parameters)
    _check_numbers(p.numbers())
    plan = _plans.find((), (logits,), p.tensors())
    ids, valid = _fresh(logits)
    plan(p, logits, ids, valid)
    return ids, valid


def _fresh(logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:-1]
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return ids, torch.empty(shape, dtype=torch.bool, device=logits.device)


def _fake(logits: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    _check(logits, *parameters)
    return _fresh(logits)


_sample = register(
    "sample(Tensor logits, Tensor? temperatures, Tensor? top_ks, Tensor? top_ps, Tensor? min_ps, Tensor? seeds,"
    " Tensor? offsets, float temperature, int top_k, float top_p, float min_p, int seed, int offset)"
    " -> (Tensor, Tensor)",
    _kernel,
    _fake,
    _check,
)
