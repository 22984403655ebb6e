"""The rules of the package's structure, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepass.dispatch import BACKENDS, TABLE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "onepass"

# Low to high: a module imports from its own layer and from those before it. Names on one line may not import each
# other. dispatch reaches the ops by name at run time, which is why it stands below them.
LAYERS = (
    {"version"},
    {"errors"},
    {"settings", "progress"},
    {"launch"},
    {"dispatch"},
    {"ops"},
    {"warming"},
    {"fusion", "engine", "integrations"},
    {"bench"},
    {"tuning"},
    {"cli"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

MAX_LINES = 500


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports(name: str) -> Iterator[str]:
    """Modules of onepass that a module imports, at its top or inside a function."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import; write the module's full name"
            full_names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [full if full in SOURCES else str(node.module) for full in full_names]
        else:
            continue
        yield from (module for module in found if module.partition(".")[0] == "onepass")


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_imports_go_only_downward() -> None:
    wrong = []
    for name in SOURCES:
        own = layer(name)
        if not own:  # onepass/__init__.py gathers the public names
            continue
        assert own in RANK, f"{name} belongs to no layer of LAYERS"
        for imported in imports(name):
            other = layer(imported)
            if other != own and (not other or RANK[other] >= RANK[own]):
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_an_op_imports_no_other_op() -> None:
    """What ops share stands in onepass/ops/*.py, and those files know no op."""
    folders = {f"onepass.ops.{op}" for op in TABLE}

    def folder(module: str) -> str | None:
        return next((f for f in folders if module == f or module.startswith(f + ".")), None)

    wrong = [
        f"{name} imports {imported}"
        for name in SOURCES
        if name.startswith("onepass.ops")
        for imported in imports(name)
        if folder(imported) not in (None, folder(name))
    ]
    assert wrong == []


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb"}
    wrong = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                reads = node.attr in names
            elif isinstance(node, ast.ImportFrom):
                reads = node.module == "os" and bool(names & {alias.name for alias in node.names})
            else:
                continue
            if reads and name != "onepass.settings":
                wrong.append(f"{name}:{node.lineno}")
    assert wrong == []


def test_files_are_short() -> None:
    folders = ("onepass", "tests", "docs", "examples")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".cu", ".cuh")]
    lines = {str(f.relative_to(ROOT)): len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    assert {f: n for f, n in lines.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("op", TABLE)
def test_an_op_has_all_its_files(op: str) -> None:
    kernels = {"reference.py"} | {f"kernel_{backend}.py" for backend in TABLE[op] if backend != "reference"}
    expected = {"__init__.py", "op.py", "spec.py"} | kernels
    present = {f.name for f in (PACKAGE / "ops" / op).glob("*.py")}
    assert expected - present == set()
    assert {f for f in present if f.startswith("kernel_")} <= kernels, "a kernel file that dispatch.TABLE does not name"


def test_the_table_names_known_backends() -> None:
    for op, backends in TABLE.items():
        assert set(backends) <= set(BACKENDS), op
        assert backends[-1] == "reference", f"{op}: the reference comes last"


def test_every_op_folder_is_in_the_table() -> None:
    assert {f.parent.name for f in (PACKAGE / "ops").glob("*/op.py")} == set(TABLE)
