"""Imports point inwards: every file is parsed and compared with the table that ARCHITECTURE.md shows."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "openwork"
BASE = {"errors", "files"}

# Room -> rooms of openwork that it may import. `from openwork import __version__` is free to all.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "indices": set(),
    "prototext": {"errors"},
    "graph": BASE | {"indices"},
    "importance": {"errors", "graph"},
    "sparsity": {"errors"},
    "config": BASE | {"indices", "prototext"},
    "record": BASE | {"indices", "prototext"},
    "search": {"errors", "config", "graph", "importance", "prototext"},
    "report": BASE | {"graph", "search"},
    "onnx": BASE | {"sparsity"},
    "convert": BASE | {"onnx", "sparsity"},
    "retrain": BASE | {"config", "graph", "importance", "record", "report", "search"},
    "torch": BASE | {"config", "graph", "importance", "record", "report", "retrain", "search", "sparsity"},
    "tensorflow": BASE | {"config", "graph", "importance", "record", "report", "retrain", "search", "sparsity"},
    "demo": BASE | {"record", "report", "torch"},
    "demo_tensorflow": BASE | {"demo", "tensorflow"},
    "cli": {"errors"},
}

# Room -> what it may import from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "indices": {"numpy"},
    "prototext": {"numpy", "protobuf"},
    "graph": {"numpy", "scipy"},
    "importance": {"numpy"},
    "sparsity": {"numpy", "numba"},
    "config": {"numpy"},
    "record": {"numpy", "protobuf"},
    "search": {"numpy"},
    "report": {"numpy", "rich", "jinja2"},
    "onnx": {"numpy", "protobuf", "onnx"},
    "convert": {"numpy", "protobuf", "onnx", "onnxruntime", "tensorflow", "tf2onnx", "click", "rich"},
    "retrain": {"numpy", "onnx", "onnxruntime", "rich"},
    "torch": {"numpy", "protobuf", "torch", "onnx", "onnxruntime", "click", "rich"},
    "tensorflow": {"numpy", "protobuf", "tensorflow", "keras", "rich"},
    "demo": {"numpy", "torch", "onnxruntime", "sklearn", "click", "rich"},
    "demo_tensorflow": {"numpy", "tensorflow", "click", "rich"},
    "cli": {"click"},
}

# Room -> what it may import inside functions only, with the reason.
INSIDE_FUNCTIONS: dict[str, dict[str, str]] = {
    "sparsity": {"numba": "an extra; without it NumPy does the same"},
    "report": {"jinja2": "an extra; only the HTML page needs it"},
    "convert": {
        "onnxruntime": "only run-check runs a model",
        "tensorflow": "an extra; only --framework 3 reads its files, in a process of its own",
        "tf2onnx": "as TensorFlow",
    },
    "retrain": {
        "onnx": "an extra; only the latency cost makes layers to run",
        "onnxruntime": "an extra; only the latency cost runs layers",
    },
    "torch": {
        "onnx": "an extra beside torch; the checker of exported files and the files of timed layers need it",
        "onnxruntime": "an extra beside torch; the latency cost runs layers, an export is compared with its model",
    },
    "demo": {
        "onnxruntime": "missing packages are reported before it is needed",
        "sklearn": "as onnxruntime",
    },
}


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether inside a function."""

    file: str
    line: int
    room: str
    target: str
    inside: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def room_of(module: str) -> str:
    """Second part of a dotted name below openwork; empty for openwork itself."""
    return [*module.split("."), ""][1]


def names_of(node: ast.stmt, module: str, package: bool) -> list[str]:
    """Full names of the modules that an import statement may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (1 if package else 0)]
        base = ".".join([*parts, base] if base else parts)
    if base == "openwork":  # the names may be rooms
        return [f"openwork.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
    return [base]


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file, those inside functions included."""
    module = ".".join(("openwork", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for name in names_of(child, module, path.name == "__init__.py"):
                    yield Import(str(path.relative_to(ROOT)), child.lineno, room_of(module), name, inside)
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")
IMPORTS = [found for path in FILES for found in imports_of(path)]
OWN = [found for found in IMPORTS if found.target.split(".")[0] == "openwork"]
FOREIGN = [
    found
    for found in IMPORTS
    if found.target.split(".")[0] not in sys.stdlib_module_names and found.target.split(".")[0] != "openwork"
]


def distribution(target: str) -> str:
    """Name of a foreign module as the table writes it."""
    return "protobuf" if target.startswith("google.protobuf") else target.split(".")[0]


def test_every_room_has_a_row() -> None:
    rooms = {room_of(f"openwork.{path.relative_to(SOURCE).parts[0].removesuffix('.py')}") for path in FILES}
    assert rooms - {"__init__"} == set(ROOMS), "add the room to ROOMS, OUTSIDE and the table in ARCHITECTURE.md"


def test_allowed_imports_have_no_cycle() -> None:
    order = list(graphlib.TopologicalSorter(ROOMS).static_order())  # raises CycleError
    assert order.index("errors") < order.index("graph") < order.index("torch")


def test_rooms_import_inwards_only() -> None:
    wrong = [
        str(found)
        for found in OWN
        if room_of(found.target) != found.room and found.room and room_of(found.target) not in ROOMS[found.room]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_nothing() -> None:
    assert not [str(found) for found in IMPORTS if found.file.endswith("openwork/__init__.py")]


def test_foreign_modules_stay_in_their_rooms() -> None:
    wrong = [str(found) for found in FOREIGN if distribution(found.target) not in OUTSIDE.get(found.room, set())]
    assert not wrong, "\n".join(wrong)


def test_frameworks_of_another_room_are_imported_inside_functions() -> None:
    wrong = [
        str(found)
        for found in FOREIGN
        if distribution(found.target) in INSIDE_FUNCTIONS.get(found.room, {}) and not found.inside
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_import_no_framework_at_the_top() -> None:
    """A command says what is wrong with its options before it loads a framework."""
    heavy = {"torch", "onnx", "onnxruntime", "tensorflow", "sklearn"}
    wrong = [
        str(found)
        for found in FOREIGN
        if Path(found.file).name.startswith("command") and not found.inside and distribution(found.target) in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_are_where_the_command_line_looks() -> None:
    """The command line names modules as text, which no import statement shows."""
    tree = ast.parse((SOURCE / "cli.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_COMMANDS"
    ]
    assert table is not None
    modules = ast.literal_eval(table)
    assert {"analyze", "convert", "demo"} <= set(modules)
    for module in modules.values():
        path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert "command" in names, path


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """Room -> (rooms, outside) as ARCHITECTURE.md says."""
    rows = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"`\w+`", cells[0]):
            outside = {name.strip() for name in cells[3].split(",")} - {""}
            rows[cells[0].strip("`")] = (set(re.findall(r"`(\w+)`", cells[2])), outside)
    return rows


def test_the_page_shows_the_same_table() -> None:
    assert documented() == {room: (ROOMS[room], OUTSIDE[room]) for room in ROOMS}


@pytest.mark.parametrize(
    ("statement", "package", "expected"),
    [
        ("import torch.nn", False, ["torch.nn"]),
        ("from openwork import errors, __version__", False, ["openwork.errors"]),
        ("from openwork.graph.plan import Plan", False, ["openwork.graph.plan"]),
        ("from . import plan", False, ["openwork.graph"]),
        ("from ..torch import prune", False, ["openwork.torch"]),
        ("from .plan import Plan", True, ["openwork.graph.inner.plan"]),
    ],
)
def test_import_statements_are_understood(statement: str, package: bool, expected: list[str]) -> None:
    (node,) = ast.parse(statement).body
    module = "openwork.graph.inner" if package else "openwork.graph.select"
    assert names_of(node, module, package) == expected
