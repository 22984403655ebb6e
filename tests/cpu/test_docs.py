"""The docs are what the code and the results say, and their examples run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onepass

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_generated_parts_are_up_to_date() -> None:
    done = run_python("docs/generate.py", "--check")
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_the_quickstart_runs() -> None:
    done = run_python("examples/quickstart.py")
    assert done.returncode == 0, done.stderr
    difference = re.search(r"largest difference: (\S+)", done.stdout)
    assert difference
    assert float(difference[1]) < 0.1, "more than a few units in the last place of bfloat16 at values near 10"
    assert "layer_norm: runs on" in done.stdout


def test_the_readme_names_the_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(command in text for command in ("make run", "make test"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    names = re.findall(r"`((?:onepass|tests|docs|examples)/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    assert [n for n in names if not (ROOT / n).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_onepass_in_the_text_exist(page: Path) -> None:
    names = set(re.findall(r"\bonepass\.(\w+)", page.read_text(encoding="utf-8")))
    assert {n for n in names if not hasattr(onepass, n)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_text_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(_runnable(block))


def _runnable(block: str) -> str:
    """A bare signature, as the API page shows them, as a function without a body."""
    return f"def {block.strip()}: ..." if re.fullmatch(r"\w+\(.*\) -> [^\n]+", block.strip(), re.DOTALL) else block
