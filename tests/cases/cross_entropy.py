"""Inputs of cross_entropy that broke other libraries, and their siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cases import BF16, FP16, FP32, Case, normal
from cases.compile_facts import Compiled
from onepass.ops.cross_entropy.op import Desc
from onepass.ops.cross_entropy.spec import SPEC
from onepass.ops.spec import Inputs, upcast

__all__ = ["CASES", "COMPILED", "SPEC", "eager", "in_place_forms", "outputs", "row_inputs", "truths"]

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def outputs(inputs: Inputs) -> tuple[str, ...]:
    return ("loss", "lse") if inputs.get("return_lse") else ("loss",)


def truths(inputs: Inputs) -> tuple[Tensor | None, ...]:
    results = SPEC.reference(**upcast(inputs))
    return results if isinstance(results, tuple) else (results,)


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    """Torch's own, but for targets that it refuses and the sizes that it has no result for."""
    safe = _torch_refuses(inputs)
    results = SPEC.reference(**inputs) if safe else SPEC.unfused(**inputs)
    return results if isinstance(results, tuple) else (results,)


def _torch_refuses(inputs: Inputs) -> bool:
    logits, target = inputs["logits"], inputs["target"]
    outside = (target < 0) | (target >= logits.shape[-1])
    return logits.numel() == 0 or bool((outside & (target != inputs.get("ignore_index", -100))).any())


def in_place_forms(inputs: Inputs) -> tuple[dict[str, str], ...]:
    return ()


def row_inputs(inputs: Inputs) -> tuple[str, ...]:
    return ("logits", "target")


def targets(device: torch.device, *shape: int, vocab_size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A target for each row; they spread over the vocabulary, its first and last class among them."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    spread = torch.arange(count) * max(1, vocab_size // 7 + 1) + vocab_size - 1
    return (spread % max(1, vocab_size)).view(shape).to(device=device, dtype=dtype)


def plain(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float = 2.0, base: float = 0.0, **more: Any
) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        logits = normal(device, *shape, dtype=dtype, scale=scale, base=base)
        target = targets(device, *shape[:-1], vocab_size=shape[-1])
        return {"logits": logits, "target": target, "reduction": "none", "return_lse": True, **more}

    return build


def _rows(
    name: str, dtype: torch.dtype, fill: Callable[[Tensor, Tensor], None], n: int = 1000, rows: int = 8, **more: Any
) -> Case:
    """Random rows of which `fill` changes some, or their targets."""

    def build(device: torch.device) -> Inputs:
        cpu = torch.device("cpu")
        logits, target = normal(cpu, rows, n, scale=2.0), targets(cpu, rows, vocab_size=n)
        fill(logits, target)
        inputs = {"logits": logits.to(device=device, dtype=dtype), "target": target.to(device)}
        return inputs | {"reduction": "none", "return_lse": True, **more}

    return Case(name, build)


def _cases() -> Iterator[Case]:
    for dtype in (BF16, FP16, FP32):
        yield Case(f"plain-{NAMES[dtype]}", plain((9, 4096), dtype))
        yield Case(f"smoothing-{NAMES[dtype]}", plain((9, 4096), dtype, label_smoothing=0.1))
        yield Case(f"softcap-{NAMES[dtype]}", plain((9, 4096), dtype, softcap=30.0))
        yield Case(f"softcap-exceeded-{NAMES[dtype]}", plain((9, 1000), dtype, scale=40.0, softcap=20.0))
        yield Case(f"both-{NAMES[dtype]}", plain((9, 1000), dtype, softcap=5, label_smoothing=0.3))
        yield _rows(f"S1-rows-{NAMES[dtype]}", dtype, _infinite)
        yield _rows(f"S1-rows-smoothing-{NAMES[dtype]}", dtype, _infinite, label_smoothing=0.1)
        yield _rows(f"S2-nan-{NAMES[dtype]}", dtype, _nan)
    yield Case("smoothing-1", plain((5, 111), FP32, label_smoothing=1))
    yield _rows("S1-rows-softcap", BF16, _infinite, softcap=30.0)
    yield _rows("S1-rows-long", BF16, _infinite, n=40000)
    yield _rows("S1-rows-long-smoothing", FP32, _infinite, n=40000, label_smoothing=0.1)
    for base in (-6e4, 6e4, -1e6):
        yield Case(f"S1-base-{base:g}-fp32", plain((8, 20000), FP32, base=base))
        yield Case(f"S1-base-{base:g}-fp32-smoothing", plain((8, 1000), FP32, base=base, label_smoothing=0.1))
    yield Case("S1-base-minus-6e4-bf16", plain((8, 20000), BF16, base=-6e4, scale=500.0))
    yield Case("S1-base-minus-5e4-fp16", plain((8, 1000), FP16, base=-5e4, scale=100.0))
    yield _rows("confident", FP32, lambda x, t: x.scatter_(1, t[:, None], 60.0))
    yield from _sizes()
    yield from _targets()
    yield from _layouts()


def _sizes() -> Iterator[Case]:
    for n in (1, 2, 3, 17, 111, 255, 257, 2049, 16384, 16385):  # S6
        yield Case(f"S6-{n}-bf16", plain((5, n), BF16))
    for n in (3, 111, 8193):
        yield Case(f"S6-{n}-fp32", plain((5, n), FP32, label_smoothing=0.1))
    for n in (128256, 151936):
        yield Case(f"S6-{n}-bf16", plain((3, n), BF16))
    yield Case("S6-151936-fp32-all", plain((2, 151936), FP32, softcap=30.0, label_smoothing=0.1))
    yield Case("300001-bf16-in-steps", plain((2, 300001), BF16))
    yield Case("150001-fp32-in-steps-all", plain((2, 150001), FP32, softcap=30.0, label_smoothing=0.1))
    yield Case("vector", plain((1000,), BF16))
    yield Case("batch", plain((2, 3, 576), BF16))
    for shape in ((0, 4096), (3, 0, 100), (3, 0)):
        for reduction in ("none", "mean", "sum"):
            name = f"N5-{'x'.join(map(str, shape))}-{reduction}"
            yield Case(name, plain(shape, BF16, reduction=reduction))
    yield Case("S7-many-rows-half-ignored", _half_ignored, many_programs=True)
    for reduction in ("mean", "sum"):
        yield Case(f"{reduction}-one-block", plain((100, 111), BF16, reduction=reduction), many_programs=True)
        yield Case(f"{reduction}-blocks", plain((300, 111), BF16, reduction=reduction), many_programs=True)
    yield Case("many-blocks-mean", plain((140000, 3), FP32, reduction="mean"), many_programs=True)
    yield Case("N14-65537-rows", plain((65537, 5), BF16), many_programs=True)


def _targets() -> Iterator[Case]:
    for reduction in ("none", "mean", "sum"):
        more: dict[str, Any] = {"reduction": reduction}
        yield _rows(f"S7-all-ignored-{reduction}", BF16, lambda x, t: t.fill_(-100), **more)
        yield _rows(f"S7-one-ignored-{reduction}", BF16, lambda x, t: t[3].fill_(-100), **more)
        yield _rows(f"S7-ignored-nan-{reduction}", BF16, _ignored_nan, **more)
        yield _rows(f"ignore-index-5-{reduction}", FP32, lambda x, t: t[2:4].fill_(5), ignore_index=5, **more)
        yield _rows(f"outside-{reduction}", BF16, _outside, **more)
        yield Case(f"{reduction}-without-lse", plain((8, 1000), BF16, reduction=reduction, return_lse=False))
        yield Case(f"smoothing-{reduction}", plain((8, 1000), FP32, reduction=reduction, label_smoothing=0.1))
    yield _rows("ignored-smoothing", BF16, lambda x, t: t[3].fill_(-100), reduction="mean", label_smoothing=0.1)
    yield Case("target-int32", _int32)


def _layouts() -> Iterator[Case]:
    def logits(name: str, make: Callable[[torch.device], Tensor]) -> Case:
        def build(device: torch.device) -> Inputs:
            x = make(device)
            target = targets(device, *x.shape[:-1], vocab_size=x.shape[-1])
            return {"logits": x, "target": target, "reduction": "none", "return_lse": True}

        return Case(name, build)

    yield logits("N4-transposed", lambda d: normal(d, 111, 7, dtype=BF16).t())
    yield logits("N4-slice", lambda d: normal(d, 5, 1200, dtype=BF16)[:, 100:1100])
    yield logits("N4-tokens-cut-off", lambda d: normal(d, 3, 4, 576, dtype=BF16)[:, :-1])
    yield logits("N4-expanded", lambda d: normal(d, 1, 576, dtype=BF16).expand(5, 576))
    yield logits("N7-offset-1", lambda d: normal(d, 5 * 576 + 1, dtype=BF16)[1:].view(5, 576))
    yield logits("N7-odd-stride", lambda d: normal(d, 5, 577, dtype=BF16)[:, 1:])
    yield Case("target-strided", _target_strided)
    yield Case("target-tokens-cut-off", _target_cut)


def _infinite(x: Tensor, target: Tensor) -> None:
    x[0] = -torch.inf
    x[1, ::2] = -torch.inf
    x[2, :-1] = -torch.inf
    target[2] = x.shape[1] - 1
    x[3, 17] = torch.inf
    x[4, :] = -6e4
    x[5, target[5]] = -torch.inf
    x[6, 7], x[6, 9] = torch.inf, -torch.inf
    target[6] = 7


def _nan(x: Tensor, target: Tensor) -> None:
    x[::2] = torch.nan
    x[1, 0] = torch.nan
    x[3, -1], x[3, 0] = torch.nan, torch.inf


def _ignored_nan(x: Tensor, target: Tensor) -> None:
    x[3] = torch.nan
    target[3] = -100


def _outside(x: Tensor, target: Tensor) -> None:
    target[1], target[4], target[5] = x.shape[1], -1, 2**40


def _half_ignored(device: torch.device) -> Inputs:
    """More programs than the Triton kernel takes for few: it does not read ignored rows."""
    inputs = plain((5000, 111), BF16, reduction="mean", return_lse=False)(device)
    inputs["target"][::2] = -100
    inputs["logits"][::4] = torch.nan
    return inputs


def _int32(device: torch.device) -> Inputs:
    target = targets(device, 7, vocab_size=1000, dtype=torch.int32)
    target[2] = -100
    return {"logits": normal(device, 7, 1000, dtype=BF16), "target": target, "reduction": "mean", "return_lse": True}


def _target_strided(device: torch.device) -> Inputs:
    target = targets(device, 5, 3, vocab_size=576)[:, 1]
    return {"logits": normal(device, 5, 576, dtype=BF16), "target": target, "reduction": "none", "return_lse": True}


def _target_cut(device: torch.device) -> Inputs:
    target = targets(device, 3, 5, vocab_size=576)[:, 1:]
    return {"logits": normal(device, 3, 4, 576, dtype=BF16), "target": target, "reduction": "mean"}


CASES = tuple(_cases())


def batches(device: torch.device) -> Iterator[Inputs]:
    for n, dtype in ((111, BF16), (40000, BF16), (1000, FP32)):
        more: Inputs = {"label_smoothing": 0.1, "softcap": 30.0} if dtype == FP32 else {}
        yield plain((19 if n > 1000 else 140, n), dtype, **more)(device)


def overload_calls(device: torch.device) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Every registered overload with arguments, for opcheck."""
    ops = torch.ops.onepass
    x, target = normal(device, 2, 3, 24, dtype=BF16), targets(device, 2, 3, vocab_size=24)
    yield "cross_entropy", ops.cross_entropy.default, (x, target, -100, 0.0, None, "mean")
    yield "cross_entropy-none", ops.cross_entropy.default, (x, target, -100, 0.1, 30.0, "none")
    yield "cross_entropy_lse", ops.cross_entropy_lse.default, (x.transpose(0, 1), target.t(), 3, 0.0, None, "sum")


def _compiled(
    kernel: str, vocab_size: int = 128256, dtype: torch.dtype = BF16, full: bool = False, num_rows: int = 200
) -> Callable[[Any], Any]:
    """`full`: with all options."""

    def specialize(features: Any) -> Any:
        from onepass.ops.cross_entropy import config, kernel_triton

        device = torch.device("cuda", 0)
        desc = Desc(device, dtype, torch.int64, num_rows, vocab_size, "mean", full, full, full, True, ())
        if kernel == "reduce":
            return kernel_triton.specialize_reduce(desc, features)
        shape = config.heuristic(vocab_size, dtype.itemsize)
        function = kernel_triton.specialize_partial if kernel == "partial" else kernel_triton.specialize_combine
        return function(desc, shape, features)

    return specialize


# Of the first kernel's results and of the others' inputs an access has one number a row.
COMPILED = {
    "combine": Compiled(_compiled("combine"), wide=False),
    "combine-full": Compiled(_compiled("combine", full=True), archs=(90,), wide=False),
    "combine-fp32-full": Compiled(_compiled("combine", dtype=FP32, full=True), archs=(90,), wide=False),
    "reduce": Compiled(_compiled("reduce"), archs=(90,), wide=False),
    "partial": Compiled(_compiled("partial"), wide=False),
    "partial-full": Compiled(_compiled("partial", full=True), archs=(80, 90), wide=False),
    "partial-many-rows": Compiled(_compiled("partial", num_rows=8192), archs=(90,), wide=False),
    "partial-111": Compiled(_compiled("partial", 111), archs=(90,), wide=False),
    "partial-1000000": Compiled(_compiled("partial", 1_000_000), archs=(90,), wide=False),
    "partial-fp16": Compiled(_compiled("partial", dtype=FP16), archs=(90,), wide=False),
    "partial-fp32": Compiled(_compiled("partial", dtype=FP32), archs=(90,), wide=False),
    "partial-fp32-full": Compiled(_compiled("partial", dtype=FP32, full=True), archs=(90,), wide=False),
}
