"""How close a result must be: tests and benchmarks use the same rule.

The truth is the reference run in float64. A result passes when its largest error is at most twice what the
unfused ops make in the same dtype, plus one rounding (the rule of the flash-attention test suite).
NaN and infinities must stand where the truth has them. One rounding is a unit in the last place at the largest
magnitude of the truth: two values, each rounded correctly, may differ by that much.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Accuracy(NamedTuple):
    """Largest absolute errors against float64; `ok` is the verdict."""

    error: float
    eager_error: float
    bound: float
    ok: bool


def compare(actual: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> Accuracy:
    """Judge `actual` against `truth` (float64), with `eager` in actual's dtype as the yardstick.

    All three have the same shape.
    """
    got, want = actual.double(), truth.double()
    if got.shape != want.shape:
        return Accuracy(float("inf"), 0.0, 0.0, False)
    finite = want.isfinite()
    eager_finite = finite & eager.double().isfinite()
    # A half-precision result may overflow where float64 does not; then eager must overflow there as well.
    same_special = bool(
        torch.where(finite, got.isfinite() | ~eager_finite, (got.isnan() & want.isnan()) | (got == want)).all()
    )
    checked = eager_finite & got.isfinite()
    if not bool(checked.any()):
        return Accuracy(0.0, 0.0, 0.0, same_special)
    error = float((got - want)[checked].abs().max())
    eager_error = float((eager.double() - want)[checked].abs().max())
    rounding = float(want[checked].abs().max()) * torch.finfo(actual.dtype).eps
    bound = 2 * eager_error + rounding
    return Accuracy(error, eager_error, bound, same_special and error <= bound)
