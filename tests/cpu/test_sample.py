"""sample on the CPU: wrong arguments, its random numbers, the distribution of what it draws, seeds of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, checks, normal
from cases import sample as table
from torch import Tensor

import onepass
from onepass.errors import ArgumentTypeError, ArgumentValueError, GradientsNotSupportedError
from onepass.ops.sample import fixed_point
from onepass.ops.sample.reference import philox

CPU = torch.device("cpu")


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(CPU, *(shape or (4, 8)), dtype=dtype)


TYPE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-list": (lambda: onepass.sample([1.0], seed=1), "'logits': expected a torch.Tensor, got list"),
    "logits-list-no-seed": (lambda: onepass.sample([1.0]), "'logits': expected a torch.Tensor, got list"),
    "logits-int": (lambda: onepass.sample(_x().int(), seed=1), "'logits': expected float32, .*int32"),
    "temperature-text": (lambda: onepass.sample(_x(), temperature="hot"), "'temperature': expected a number.*got str"),
    "top_k-float": (lambda: onepass.sample(_x(), top_k=2.0), "'top_k': expected an int.*got float"),
    "seed-float": (lambda: onepass.sample(_x(), seed=0.5), "'seed': expected an int.*got float"),
    "temperature-dtype": (
        lambda: onepass.sample(_x(), temperature=_x(4, dtype=BF16)),
        "'temperature': expected torch.float32, got torch.bfloat16",
    ),
    "top_k-dtype": (lambda: onepass.sample(_x(), top_k=_x(4)), "'top_k': expected torch.int64 or torch.int32, got"),
    "seed-dtype": (lambda: onepass.sample(_x(), seed=torch.ones(4).int()), "'seed': expected torch.int64, got"),
}

VALUE_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "logits-scalar": (lambda: onepass.sample(torch.tensor(1.0), seed=1), "'logits': expected at least one dimension"),
    "temperature-negative": (lambda: onepass.sample(_x(), temperature=-0.1), "'temperature': expected a finite"),
    "temperature-infinite": (lambda: onepass.sample(_x(), temperature=math.inf), "'temperature': .*got inf"),
    "temperature-nan": (lambda: onepass.sample(_x(), temperature=math.nan), "'temperature': .*got nan"),
    "top_k-negative": (lambda: onepass.sample(_x(), top_k=-2), "'top_k': expected -1, 0 .*got -2"),
    "top_p-large": (lambda: onepass.sample(_x(), top_p=1.01), "'top_p': expected a number from 0 to 1, got 1.01"),
    "top_p-nan": (lambda: onepass.sample(_x(), top_p=math.nan), "'top_p': expected a number from 0 to 1, got nan"),
    "min_p-negative": (lambda: onepass.sample(_x(), min_p=-0.5), "'min_p': expected a number from 0 to 1, got -0.5"),
    "seed-wide": (lambda: onepass.sample(_x(), seed=2**63), "'seed': expected an int64"),
    "offset-wide": (lambda: onepass.sample(_x(), seed=1, offset=-(2**63) - 1), "'offset': expected an int64"),
    "top_p-shape": (
        lambda: onepass.sample(_x(), top_p=_x(3)),
        r"'top_p': expected one element, or the shape \[4\] of the rows, got \[3\]",
    ),
    "top_k-device": (
        lambda: onepass.sample(_x(), top_k=torch.ones(4, dtype=torch.int64, device="meta")),
        "'top_k': expected the device of the logits, cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPE_ERRORS[name]
    with pytest.raises(ArgumentTypeError, match=f"sample: argument {message}"):
        call()


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_a_wrong_value_is_named(name: str) -> None:
    call, message = VALUE_ERRORS[name]
    with pytest.raises(ArgumentValueError, match=f"sample: argument {message}"):
        call()


@pytest.mark.parametrize("argument", ["logits", "temperature", "top_p"])
def test_gradients_are_refused_with_the_way_out(argument: str) -> None:
    inputs = {"logits": _x(), "temperature": torch.ones(4), "top_p": torch.ones(4)}
    inputs[argument].requires_grad_()
    with pytest.raises(GradientsNotSupportedError, match=rf"'{argument}' requires grad.*torch\.multinomial"):
        onepass.sample(**inputs)
    with torch.no_grad():
        onepass.sample(**inputs)


def test_philox_gives_the_authors_numbers() -> None:
    """The known answers of Random123's own test."""

    def word(low: int, high: int) -> Tensor:
        value = high << 32 | low
        return torch.tensor([value - (value >> 63 << 64)])

    ones = 0xFFFFFFFF
    zero = word(0, 0)
    known = [
        (zero, zero, zero, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (word(ones, ones), word(ones, ones), word(ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            word(0xA4093822, 0x299F31D0),
            word(0x243F6A88, 0x85A308D3),
            word(0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for seed, row, offset, words in known:
        assert tuple(int(w) for w in philox(seed, row, offset)) == words


def _weights(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def _excess(observed: Tensor, expected: Tensor) -> float:
    """By how many standard deviations chi-square exceeds its mean."""
    seen = expected > 0
    assert int(observed[~seen].sum()) == 0
    chi_square = float(((observed - expected)[seen] ** 2 / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    return (chi_square - freedom) / math.sqrt(2 * max(freedom, 1))


# 16 probabilities, some of them equal, and which of them the limits keep, worked out by hand. Ranked: 6, 2, 9, 0, ...
P = [0.10, 0.02, 0.15, 0.05, 0.01, 0.08, 0.20, 0.03, 0.02, 0.12, 0.04, 0.04, 0.06, 0.03, 0.03, 0.02]
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], float, set[int]]] = {
    "all": ({}, 1.0, set(range(16))),
    "temperature": ({"temperature": 0.5}, 2.0, set(range(16))),
    "hot": ({"temperature": 4.0}, 0.25, set(range(16))),
    "top_k": ({"top_k": 4}, 1.0, {6, 2, 9, 0}),
    # 0.04 twice: the lower index is kept.
    "top_k-tie": ({"top_k": 8}, 1.0, {6, 2, 9, 0, 5, 12, 3, 10}),
    # Before rank 4: 0.57.
    "top_p": ({"top_p": 0.55}, 1.0, {6, 2, 9, 0}),
    "top_p-next": ({"top_p": 0.6}, 1.0, {6, 2, 9, 0, 5}),
    # 0.76 + 0.04 + 0.04 stand before the three of 0.03; two of them are needed.
    "top_p-tie": ({"top_p": 0.885}, 1.0, {6, 2, 9, 0, 5, 12, 3, 10, 11, 7, 13}),
    "min_p": ({"min_p": 0.45}, 1.0, {6, 2, 9, 0}),
    # Of the top 4, renormalised: 0.351, 0.263, 0.211, 0.175.
    "top_k-top_p": ({"top_k": 4, "top_p": 0.62}, 1.0, {6, 2, 9}),
    "top_p-min_p": ({"top_p": 0.7, "min_p": 0.45}, 1.0, {6, 2, 9, 0}),
    # Squares: 0.04, 0.0225, 0.0144, 0.01, 0.0064 of the largest are 1, 0.56, 0.36, 0.25, 0.16.
    "every-limit": ({"temperature": 0.5, "top_k": 6, "top_p": 0.95, "min_p": 0.2}, 2.0, {6, 2, 9, 0}),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_distribution(name: str) -> None:
    limits, power, kept = DISTRIBUTIONS[name]
    num_draws = 100_000
    ids = onepass.sample(_weights(P).expand(num_draws, 16), seed=2024, **limits)
    expected = torch.tensor([p**power if i in kept else 0.0 for i, p in enumerate(P)], dtype=torch.float64)
    observed = torch.bincount(ids, minlength=16).double()
    assert _excess(observed, expected / expected.sum() * num_draws) < 3


def test_rows_offsets_and_seeds_are_independent() -> None:
    """Pairs of draws fall evenly into all pairs of tokens, with neighbours in each part of the counter and the key."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = probabilities.log().float().expand(40_000, 4)
    base = onepass.sample(logits, seed=5, offset=7)
    others = {
        "next row": base.roll(1),
        "a row 256 on": base.roll(256),
        "next offset": onepass.sample(logits, seed=5, offset=8),
        "offset 2^32 on": onepass.sample(logits, seed=5, offset=7 + 2**32),
        "next seed": onepass.sample(logits, seed=6, offset=7),
        "seed 2^32 on": onepass.sample(logits, seed=5 + 2**32, offset=7),
    }
    expected = torch.outer(probabilities, probabilities).flatten() * len(base)
    for name, other in others.items():
        observed = torch.bincount(base * 4 + other, minlength=16).double()
        assert _excess(observed, expected) < 4, name


def test_seeds_by_row_draw_like_any_others() -> None:
    num_draws = 100_000
    seeds = torch.arange(num_draws)
    ids = onepass.sample(_weights(P).expand(num_draws, 16), seed=seeds)
    expected = torch.tensor(P, dtype=torch.float64)
    assert _excess(torch.bincount(ids, minlength=16).double(), expected / expected.sum() * num_draws) < 3


def test_the_same_seed_and_a_fresh_offset() -> None:
    """S8: numbers and tensors say the same."""
    x = _x(64, 1000)
    first = onepass.sample(x, seed=3, offset=1)
    assert torch.equal(first, onepass.sample(x, seed=torch.tensor(3), offset=torch.tensor([1])))
    assert not torch.equal(first, onepass.sample(x, seed=3, offset=2))
    assert not torch.equal(first, onepass.sample(x, seed=4, offset=1))
    assert torch.equal(onepass.sample(x, seed=3), onepass.sample(x, seed=3, offset=0))


def test_without_a_seed_torch_s_generator_decides() -> None:
    x = _x(64, 1000)
    torch.manual_seed(1)
    first, second = onepass.sample(x), onepass.sample(x)
    torch.manual_seed(1)
    assert torch.equal(onepass.sample(x), first)
    assert torch.equal(onepass.sample(x), second)
    assert not torch.equal(first, second)


def test_without_a_seed_in_a_compiled_function() -> None:
    """One graph, and two calls in it are two draws."""
    x = _x(64, 1000)
    compiled = torch.compile(
        lambda x: (onepass.sample(x, top_p=0.9), onepass.sample(x, top_p=0.9)), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(x)
    assert not torch.equal(first, second)


def test_ids_alone_are_the_ids_of_the_pair() -> None:
    x = _x(3, 50)
    ids, valid = onepass.sample(x, seed=1, return_valid=True)
    assert torch.equal(onepass.sample(x, seed=1), ids)
    assert ids.dtype == torch.int64
    assert valid.dtype == torch.bool


def test_row_strides_past_2_31() -> None:
    """N1: few rows, far apart; what lies between is never touched, so it takes no memory."""
    memory = torch.empty(2**31 + 100, dtype=BF16)
    x = memory.as_strided((3, 100), (2**30, 1))
    x.copy_(normal(CPU, 3, 100, dtype=BF16))
    inputs = {"logits": x, "top_p": 0.9, "seed": 4}
    checks.check_values(table, {**inputs, "logits": x.clone()}, checks.call(table, inputs))


def test_sums_of_weights_fit_whatever_the_vocabulary() -> None:
    for vocab_size in (1, 111, 2**23, 2**23 + 1, 2**24, 2**31):
        weight = 2**fixed_point.WEIGHT_BITS >> fixed_point.dropped_bits(vocab_size)
        assert vocab_size * weight < 2**63
        assert weight >= 2**31
    assert fixed_point.dropped_bits(2**22) == 0
