"""Regenerates what the docs take from elsewhere: figures from results/, the API from docstrings, tables from code.

    python docs/generate.py          rewrites the files
    python docs/generate.py --check  changes nothing; fails and names the files that are out of date

Two pages are generated whole. In the others, and in README.md, a block between `<!-- generated: name -->` and
`<!-- end -->` is: `BLOCKS` below says what fills it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import api_page
import performance_page
import tables

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "api.md": api_page.page,
    DOCS / "performance.md": performance_page.page,
}
BLOCKS: dict[str, Callable[[], str]] = {
    "quickstart": tables.quickstart,
    "ops": tables.ops,
    "settings": tables.settings,
    "counts": tables.counts,
    "example_reference": lambda: tables.definitions(
        "ops/add_relu/reference.py", "add_relu", "unsupported_reasons", "prepare"
    ),
    "example_registration": lambda: tables.definitions("ops/add_relu/op.py", "_add_relu", "_add_relu_out"),
    "example_reasons": lambda: tables.definitions("ops/add_relu/kernel_cpu.py", "unsupported_reasons"),
    "example_table": lambda: tables.definitions("dispatch.py", "TABLE"),
    "headline": performance_page.headline,
    "fusion": performance_page.fusion,
    "ops_figures": performance_page.ops_figures,
}
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_blocks(text: str) -> str:
    """The text with every block filled anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]().strip()}\n{m[3]}", text)


def generated() -> dict[Path, str]:
    """Every file that holds something generated, as it should be."""
    files = {path: page() for path, page in PAGES.items()}
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        if path not in files:
            files[path] = with_blocks(path.read_text(encoding="utf-8"))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is out of date")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
