"""Generated blocks that come from the code: the ops, the settings, the example, what fusion saves by count."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

from onepass import dispatch
from onepass import settings as settings_module
from onepass.ops import spec as specs

ROOT = Path(__file__).resolve().parents[1]


def quickstart() -> str:
    """examples/quickstart.py without its docstring, as a code block."""
    source = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    first = ast.parse(source).body[1]
    code = "\n".join(source.splitlines()[first.lineno - 1 :]).strip()
    return f"```python\n{code}\n```"


def definitions(file: str, *names: str) -> str:
    """Top-level functions and assignments of a module of onepass, as they stand there."""
    source = (ROOT / "onepass" / file).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.get_source_segment(source, node) or ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = ast.get_source_segment(source, node) or ""
    wide = any("\n" in found[name] for name in names)
    code = ("\n\n\n" if wide else "\n").join(found[name] for name in names)
    return f"```python\n{code}\n```"


def ops() -> str:
    """Ops × backends, from the dispatch table; a number is the order in which a backend is tried."""
    rows = ["| op | what it computes | " + " | ".join(dispatch.BACKENDS) + " |"]
    rows.append("| --- " * (2 + len(dispatch.BACKENDS)) + "|")
    for op, backends in dispatch.TABLE.items():
        tried = [b for b in backends if b != "reference"]
        cells = []
        for backend in dispatch.BACKENDS:
            if backend not in backends:
                cells.append("")
            else:
                cells.append("on request" if backend == "reference" else f"{tried.index(backend) + 1}")
        rows.append(f"| `{op}` | {_summary(op)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _summary(op: str) -> str:
    """The first line of the op module's docstring, without the op's name."""
    module = importlib.import_module(f"onepass.ops.{op}.op")
    return inspect.getdoc(module).splitlines()[0].partition(": ")[2].rstrip(".")  # type: ignore[union-attr]


def settings() -> str:
    """The table of environment variables, from the docstring of settings.py."""
    lines = inspect.getdoc(settings_module).splitlines()  # type: ignore[union-attr]
    return "\n".join(line for line in lines if line.startswith("|"))


def counts() -> str:
    """Launches and bytes of every op's largest size in bfloat16, unfused and fused. Counted, not measured."""
    rows = [
        "| op | size, bf16 | launches: unfused → fused | MB moved | operations a byte |",
        "| --- | --- | --- | --- | --- |",
    ]
    for op in dispatch.TABLE:
        spec = specs.load(op)
        shape = max(spec.shapes, key=math.prod)
        with FakeTensorMode():  # tensors that hold no memory
            inputs = spec.make_inputs(shape, torch.bfloat16, torch.device("cpu"), 0)
        least, unfused, flops = spec.bytes_moved(inputs), spec.unfused_bytes(inputs), spec.flops(inputs)
        rows.append(
            f"| `{op}` | {' × '.join(map(str, shape))} | {spec.unfused_launches} → 1 "
            f"| {unfused / 1e6:.1f} → {least / 1e6:.1f} | {flops / unfused:.1f} → {flops / least:.1f} |"
        )
    return "\n".join(rows)
