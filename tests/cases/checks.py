"""What must hold for every case on every backend.

A table of cases (a module of this package) is passed as `table`. Each check raises AssertionError with what went
wrong; `check_case` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from cases import bits, clone_inputs, footprint, poisoned, poisoned_rows, whole_storage
from onepass.ops.accuracy import compare
from onepass.ops.spec import Inputs

BATCHES = (1, 3, 16, 17)


def check_case(table: Any, inputs: Inputs) -> None:
    """Values, same bits twice, inputs left alone, output forms, in-place forms."""
    before = clone_inputs(inputs)
    results = call(table, inputs)
    check_values(table, inputs, results)
    assert_same_memory(inputs, before, "the call changed its input")
    assert_same_bits(call(table, inputs), results, "the second call")
    if takes_outputs(table, inputs):
        check_output_form(table, inputs, results)
        assert_same_memory(inputs, before, "the call with outputs changed its input")
    for form in table.in_place_forms(inputs):
        check_in_place(table, inputs, form, results)


def check_case_in_few_calls(table: Any, inputs: Inputs) -> None:
    """The output form and the last in-place form, on eight rows: for slow interpreters."""
    x = main_tensor(inputs)
    if x.ndim > 1 and x.shape[0] > 8 and x.shape[-1] > 64:
        inputs = some_rows(table, inputs, slice(0, 8))
    before = clone_inputs(inputs)
    results = check_output_form(table, inputs, None) if takes_outputs(table, inputs) else call(table, inputs)
    assert_same_memory(inputs, before, "the call changed its input")
    check_values(table, inputs, results)
    for form in table.in_place_forms(inputs)[-1:]:
        check_in_place(table, inputs, form, results)


def call(table: Any, inputs: Inputs, **outputs: Tensor) -> tuple[Tensor, ...]:
    """The op's results as a tuple."""
    return as_tuple(function(table, inputs)(**inputs, **outputs))


def function(table: Any, inputs: Inputs) -> Callable[..., Any]:
    """The public function that takes these inputs: `table.function(inputs)`, where an op has several."""
    chosen: Callable[..., Any] = table.function(inputs) if hasattr(table, "function") else table.SPEC.fused
    return chosen


def takes_outputs(table: Any, inputs: Inputs) -> bool:
    """Whether the op has a form that writes to given memory."""
    return bool(table.SPEC.allocate_out(inputs))


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def check_values(table: Any, inputs: Inputs, results: tuple[Tensor, ...]) -> None:
    """Each result against float64, with the unfused ops as the yardstick; a truth of None: exactly the unfused ops'."""
    names, truths, eager = table.outputs(inputs), table.truths(inputs), table.eager(inputs)
    assert len(results) == len(names)
    for name, actual, truth, unfused in zip(names, results, truths, eager, strict=True):
        assert (actual.shape, actual.dtype, actual.device) == (unfused.shape, unfused.dtype, unfused.device), name
        assert actual.is_contiguous() or name in getattr(table, "VIEWS", ()), name
        if truth is None:
            torch.testing.assert_close(actual, unfused, rtol=0, atol=0, equal_nan=True, msg=f"'{name}' must be exact")
        else:
            accuracy = compare(actual, unfused, truth)
            assert accuracy.ok, f"'{name}': {accuracy}"


def check_output_form(table: Any, inputs: Inputs, expected: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Written into the middle of poisoned memory: the same bits (returned), and nothing around them touched."""
    made = {name: poisoned_rows(like) for name, like in zip(table.outputs(inputs), table.eager(inputs), strict=True)}
    outputs = {name: out for name, (_, out) in made.items()}
    results = call(table, inputs, **outputs)
    for result, out in zip(results, outputs.values(), strict=True):
        assert result is out
    if expected is not None:
        assert_same_bits(results, expected, "the form with outputs")
    for name, (memory, out) in made.items():
        assert not bool(poisoned(out).any()), f"'{name}' has elements that were not written"
        untouched = poisoned(memory) | footprint(out).view(memory.shape)
        assert bool(untouched.all()), f"the call wrote beside '{name}'"
    return tuple(result.contiguous() for result in results)


def check_in_place(table: Any, inputs: Inputs, form: dict[str, str], expected: tuple[Tensor, ...]) -> None:
    """Outputs that are exactly an input, as `form` says: {"out": "x"}. Skipped where they cannot be written."""
    if not writable(inputs, form):
        return
    copy = clone_inputs(inputs)
    before = {target: whole_storage(copy[target]).clone() for target in form.values()}
    results = call(table, copy, **{name: copy[target] for name, target in form.items()})
    assert_same_bits(results, expected, f"in place, {form}")
    covered: dict[int, Tensor] = {}
    for target in form.values():
        key = copy[target].untyped_storage().data_ptr()
        covered[key] = covered[key] | footprint(copy[target]) if key in covered else footprint(copy[target])
    for target in form.values():
        changed = bits(whole_storage(copy[target])) != bits(before[target])
        outside = changed & ~covered[copy[target].untyped_storage().data_ptr()]
        assert not bool(outside.any()), f"in place, {form}: the call wrote beside '{target}'"


def writable(inputs: Inputs, form: dict[str, str]) -> bool:
    """Whether the inputs named by the form have memory of their own for each element."""
    targets = list(form.values())
    for target in targets:
        if int(footprint(inputs[target]).sum()) != inputs[target].numel():
            return False
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.numel()}
    for target, other in [*combinations(targets, 2), *((t, name) for t in targets for name in tensors if name != t)]:
        a, b = inputs[target], inputs[other]
        if a.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            continue
        exactly_the_same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
        if bool((footprint(a) & footprint(b)).any()) and (other in targets or not exactly_the_same):
            return False
    return True


def check_batch_independence(table: Any, inputs: Inputs) -> None:
    """The first rows alone, and single rows from elsewhere, have the bits they have in the whole batch; where the table
    has `batch_class(num_rows)`, in the largest batch of the same class."""
    num_rows = main_tensor(inputs).shape[0]
    if hasattr(table, "batch_class"):
        _check_batch_classes(table, inputs, num_rows)
        return
    whole = call(table, inputs)
    parts = [slice(0, size) for size in BATCHES if size <= num_rows]
    parts += [slice(i, i + 1) for i in sorted({num_rows // 2, num_rows - 1})]
    for part in parts:
        results = call(table, some_rows(table, inputs, part))
        assert_same_bits(results, tuple(w[part] for w in whole), f"rows {part.start}:{part.stop} of {num_rows}")


def _check_batch_classes(table: Any, inputs: Inputs, num_rows: int) -> None:
    for kind in {table.batch_class(size) for size in range(1, num_rows + 1)}:
        sizes = [size for size in range(1, num_rows + 1) if table.batch_class(size) == kind]
        whole = call(table, some_rows(table, inputs, slice(0, sizes[-1])))
        for size in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}:
            for part in (slice(0, size), slice(sizes[-1] - size, sizes[-1])):
                results = call(table, some_rows(table, inputs, part))
                assert_same_bits(results, tuple(w[part] for w in whole), f"rows {part} of {sizes[-1]}")


def main_tensor(inputs: Inputs) -> Tensor:
    """The op's first tensor."""
    return next(value for value in inputs.values() if isinstance(value, Tensor))


def check_captured(table: Any, inputs: Inputs) -> None:
    """A graph captured on other values gives the bits of a plain call, replay after replay."""
    expected = call(table, clone_inputs(inputs))
    static = clone_inputs(inputs)
    x = main_tensor(static)
    values = x.clone()
    x.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(table, static)
    for _ in range(2):
        x.copy_(values)
        for result in results:
            result.zero_()
        graph.replay()
        assert_same_bits(results, expected, "the replayed graph")


def some_rows(table: Any, inputs: Inputs, rows: slice) -> Inputs:
    """The inputs with these rows alone: of the tensors that `table.row_inputs(inputs)` names, or else of those that
    have the shape of the first."""
    x = main_tensor(inputs)
    named = table.row_inputs(inputs) if hasattr(table, "row_inputs") else None

    def has_rows(name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and (name in named if named is not None else value.shape == x.shape)

    return {name: value[rows] if has_rows(name, value) else value for name, value in inputs.items()}


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        different = bits(a) != bits(e)
        assert not bool(different.any()), (
            f"{what}: result {i} differs in {int(different.sum())} of {a.numel()} elements"
        )


def assert_same_memory(inputs: Inputs, before: Inputs, what: str) -> None:
    """Every byte of every input's storage is what it was."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.numel():
            same = torch.equal(bits(whole_storage(value)), bits(whole_storage(before[name])))
            assert same, f"{what} '{name}' or memory beside it"
