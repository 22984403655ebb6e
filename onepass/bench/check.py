"""Correctness before speed: a provider's result against the reference in float64.

The rule is `onepass.ops.accuracy`. Where the tensors are too large for float64 copies, a random set of rows
with the first and the last is checked; an op whose rows depend on each other fails such a check loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onepass.ops.accuracy import compare
from onepass.ops.spec import Inputs, OpSpec, upcast

CHECKED_ROWS = 256
# Elements up to which everything is checked; above, float64 copies take too much memory or, on a CPU, time.
FULL_CHECK_CPU = 2**22
FULL_CHECK_GPU = 2**26


@dataclass(frozen=True)
class Verdict:
    ok: bool
    error: float
    bound: float
    checked: str
    reason: str = ""


class Truth:
    """The float64 reference and the unfused result, in the inputs' dtype, for one set of inputs."""

    def __init__(self, spec: OpSpec, inputs: Inputs, seed: int = 0) -> None:
        self._row_inputs = spec.row_inputs
        main = inputs[spec.row_inputs[0]] if spec.row_inputs else main_tensor(inputs)
        limit = FULL_CHECK_CPU if main.device.type == "cpu" else FULL_CHECK_GPU
        self._leading = main.shape[:-1]
        num_rows = main.shape[0] if spec.row_inputs else self._leading.numel()
        self._rows: torch.Tensor | None = None
        self.checked = "all"
        if main.numel() > limit and num_rows > CHECKED_ROWS:
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randperm(num_rows, generator=generator)[:CHECKED_ROWS]
            rows[0], rows[-1] = 0, num_rows - 1
            self._rows = rows.to(main.device)
            self.checked = f"{CHECKED_ROWS} rows of {num_rows}"
        subset = {name: self._cut_input(name, value) for name, value in inputs.items()}
        self._fault = spec.fault and partial(spec.fault, subset)
        if self._fault is None:
            self._truth = as_tuple(spec.reference(**upcast(subset)))
            self._eager = as_tuple(spec.unfused(**subset))

    def judge(self, result: Any) -> Verdict:
        """The worst of the op's outputs."""
        worst = Verdict(True, 0.0, 0.0, self.checked)
        outputs = as_tuple(result)
        if self._fault is not None:
            reason = self._fault(self._cut(outputs[0]))
            return Verdict(not reason, 0.0, 0.0, self.checked, reason)
        if len(outputs) != len(self._truth):
            return Verdict(False, float("inf"), 0.0, self.checked, f"{len(outputs)} outputs, not {len(self._truth)}")
        for output, eager, truth in zip(outputs, self._eager, self._truth, strict=True):
            if output.dtype != eager.dtype:
                return Verdict(False, float("inf"), 0.0, self.checked, f"result in {output.dtype}, not {eager.dtype}")
            accuracy = compare(self._cut(output), eager, truth)
            if not accuracy.ok:
                reason = f"error {accuracy.error:.3g}, allowed {accuracy.bound:.3g} (checked: {self.checked})"
                return Verdict(False, accuracy.error, accuracy.bound, self.checked, reason)
            if accuracy.error >= worst.error:
                worst = Verdict(True, accuracy.error, accuracy.bound, self.checked)
        return worst

    def _cut_input(self, name: str, value: Any) -> Any:
        return value if self._row_inputs and name not in self._row_inputs else self._cut(value)

    def _cut(self, value: Any) -> Any:
        """The checked rows of a tensor that has the op's rows; anything else as it is."""
        if self._rows is None or not isinstance(value, torch.Tensor):
            return value
        if self._row_inputs:
            return value[self._rows]
        return value.reshape(-1, value.shape[-1])[self._rows] if value.shape[:-1] == self._leading else value


def main_tensor(inputs: Inputs) -> torch.Tensor:
    """The largest tensor of the inputs, the first of equals."""
    return max((v for v in inputs.values() if isinstance(v, torch.Tensor)), key=lambda t: t.numel() * t.element_size())


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
