"""docs/api.md, from the docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from typing import Any

import onepass
from onepass import dispatch, errors

_LINE = 100
_SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:")


def page() -> str:
    """The whole page."""
    ops = [name for name in onepass.__all__ if getattr(onepass, name).__module__.startswith("onepass.ops.")]
    rest = [name for name in onepass.__all__ if name not in ops]
    parts = [
        "# API reference",
        "Generated from the docstrings by `make docs`. Names are those of the module `onepass`.",
    ]
    parts += ["## Ops", *(entry(name, getattr(onepass, name)) for name in ops)]
    parts += ["## Everything else", *(entry(name, getattr(onepass, name)) for name in rest)]
    parts += ["### `Explanation`", "What `explain` returns.", body(dispatch.Explanation)]
    parts += ["## Errors and warnings", "In `onepass.errors`. " + first_paragraph(errors), error_table()]
    return "\n\n".join(parts) + "\n"


def entry(name: str, value: Any) -> str:
    """Heading, signature and docstring of a function or class."""
    return f"### `{name}`\n\n```python\n{signature(name, value)}\n```\n\n{body(value)}"


def signature(name: str, value: Any) -> str:
    """The signature as one would write it: annotations as in the source, one parameter a line if it is long."""
    found = inspect.signature(value)
    parameters: list[str] = []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters and not any(s.startswith("*") for s in parameters):
            parameters.append("*")
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        annotation = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        equals = " = " if annotation else "="
        default = "" if p.default is p.empty else f"{equals}{p.default!r}"
        parameters.append(f"{star}{p.name}{annotation}{default}")
    returns = "" if found.return_annotation is found.empty else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= _LINE:
        return line
    return f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def body(value: Any) -> str:
    """A docstring as Markdown: sections become lists."""
    lines: list[str] = []
    section = ""
    for line in inspect.getdoc(value).splitlines():  # type: ignore[union-attr]
        if line in _SECTIONS:
            section = line
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            lines.append(line)
        else:
            lines.append(_item(line[4:], section))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _item(line: str, section: str) -> str:
    """A line of a section, its indent removed: 'name: text' starts an item, deeper lines go on with it."""
    if section in ("Returns:", "Yields:"):
        return line
    name, colon, text = line.partition(": ")
    if line.startswith(" ") or not colon:
        return f"  {line.strip()}"
    return f"- `{name}`: {text}"


def first_paragraph(value: Any) -> str:
    """What follows the first line of a docstring, on one line."""
    paragraphs = inspect.getdoc(value).split("\n\n")  # type: ignore[union-attr]
    return " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""


def error_table() -> str:
    """Every public exception and warning, with the builtin it also is."""
    rows = ["| name | also a | when |", "| --- | --- | --- |"]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__ and not name.startswith("_"):
            builtin = next(c.__name__ for c in value.__mro__ if c.__module__ == "builtins")
            rows.append(f"| `{name}` | `{builtin}` | {' '.join(inspect.getdoc(value).split())} |")  # type: ignore[union-attr]
    return "\n".join(rows)
