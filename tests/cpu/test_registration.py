"""Calls go to their kernel directly only where torch's dispatcher would do nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import normal
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.ops import registration

CPU = torch.device("cpu")


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(CPU, 3, 8), normal(CPU, 3, 8, seed=1)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Passes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    pass


def test_a_plain_call_is_direct(inputs: tuple[torch.Tensor, ...]) -> None:
    assert registration._direct(inputs)
    with torch.no_grad():
        assert registration._direct(inputs)
    with torch.inference_mode():
        assert registration._direct(inputs)
    assert registration._direct((inputs[0], torch.nn.Parameter(inputs[1]), None, 1e-5, "silu", True))


def test_whatever_watches_sees_the_call(inputs: tuple[torch.Tensor, ...]) -> None:
    expected = onepass.add_relu(*inputs)
    with Recorder() as recorder:
        onepass.add_relu(*inputs)
    assert "onepass.add_relu.default" in recorder.names
    with Passes():
        assert not registration._direct(inputs)
        assert torch.equal(onepass.add_relu(*inputs), expected)
    with torch.profiler.profile() as profile:
        onepass.add_relu(*inputs)
    assert "onepass::add_relu" in {event.name for event in profile.events()}


def test_tensors_without_memory_or_of_a_subclass_are_dispatched(inputs: tuple[torch.Tensor, ...]) -> None:
    meta = tuple(t.to("meta") for t in inputs)
    assert not registration._direct(meta)
    assert onepass.add_relu(*meta).is_meta
    with FakeTensorMode() as mode:
        fake = onepass.add_relu(*(mode.from_tensor(t) for t in inputs))
    assert fake.shape == (3, 8)
    named = inputs[0].as_subclass(Named)
    assert not registration._direct((named, inputs[1]))
    assert not registration._direct((inputs[0], named))
    assert torch.equal(onepass.add_relu(named, inputs[1]), onepass.add_relu(*inputs))


def test_arguments_of_an_unexpected_type_are_not_direct(inputs: tuple[torch.Tensor, ...]) -> None:
    assert not registration._direct((1.0, inputs[0]))
    assert not registration._direct((inputs[0], [1.0]))
    assert not registration._direct((inputs[0], torch.float32))


def test_under_vmap_a_call_is_not_direct(inputs: tuple[torch.Tensor, ...]) -> None:
    seen = []

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(registration._direct((x, y)))
        return x + y

    torch.func.vmap(call)(*inputs)
    assert seen == [False]
