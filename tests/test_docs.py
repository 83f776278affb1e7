"""The documentation runs: its Python blocks, the console blocks marked ``run``, and its links.

Convention, for README.md, ARCHITECTURE.md, CHANGELOG.md and docs/*.md:

- Every block that opens with ```python is run. The blocks of one page run in order in one process, in an empty
  folder, and share their names. ```python no-run is shown only; give the reason beside it.
- A block that opens with ```text file=NAME is written to NAME in that folder first.
- In a block that opens with ```console run, every line that starts with "$ " is run by the shell and must succeed.
  The lines below it, up to the next "$ ", must stand in its output in this order; "..." stands for any lines.

torchvision's compiled part may not load beside this build of torch: the operators it would bring are defined first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)

# Imported by every Python process of the tests below.
STUB = """
import importlib.util
if importlib.util.find_spec("torchvision") is not None:
    import torch
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.openwork_keeps = library
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """(info string, content) of each fenced block."""
    return [(match["info"].strip(), match["body"]) for match in FENCE.finditer(page.read_text(encoding="utf-8"))]


def python_of(page: Path) -> str:
    """The Python blocks of a page as one script; lines stay where they are, so that errors name them."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        if match["info"].strip() == "python":
            first = text.count("\n", 0, match.start("body"))
            for offset, line in enumerate(match["body"].splitlines()):
                lines[first + offset] = line
    return "\n".join(lines)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows."""
    found = {}
    for info, body in blocks(page):
        match = re.fullmatch(r"text file=(\S+)", info)
        if match:
            found[match[1]] = body
    return found


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """(command, expected lines) of the console blocks that are marked ``run``."""
    found: list[tuple[str, list[str]]] = []
    for info, body in blocks(page):
        if info != "console run":
            continue
        for line in body.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def stands_in(expected: list[str], output: list[str]) -> bool:
    """Whether the expected lines are in the output, neighbours side by side unless "..." is between them."""
    runs: list[list[str]] = [[]]
    for line in expected:
        if line.strip() == "...":
            runs.append([])
        else:
            runs[-1].append(line.rstrip())
    shown = [line.rstrip() for line in output]
    place = 0
    for run in filter(None, runs):
        while place + len(run) <= len(shown) and shown[place : place + len(run)] != run:
            place += 1
        if place + len(run) > len(shown):
            return False
        place += len(run)
    return True


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stub")
    (folder / "sitecustomize.py").write_text(STUB)
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PATH": os.pathsep.join((bin_folder, os.environ.get("PATH", ""))),
        "COLUMNS": "120",
    }


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page).strip()], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for name, content in files_of(page).items():
        (tmp_path / name).write_text(content)
    code = f"exec(compile({python_of(page)!r}, {page.name!r}, 'exec'), {{'__name__': 'documentation'}})"
    script = tmp_path / "blocks.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


COMMANDS = [(page, command, expected) for page in PAGES for command, expected in commands_of(page)]


@pytest.mark.parametrize(
    ("page", "command", "expected"), COMMANDS, ids=[f"{name_of(page)}: {command}" for page, command, _ in COMMANDS]
)
def test_console_blocks_run(
    page: Path, command: str, expected: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    for name, content in files_of(page).items():
        (tmp_path / name).write_text(content)
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert stands_in(expected, done.stdout.splitlines()), done.stdout


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def test_pages_that_users_need_are_there() -> None:
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/pruning.md", "docs/amct.md", "docs/files.md"} <= names
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"README.md does not link docs/{page.name}"


def test_readme_names_every_command() -> None:
    from openwork.cli import _COMMANDS

    readme = (ROOT / "README.md").read_text()
    assert all(f"openwork {name}" in readme for name in _COMMANDS)


@pytest.mark.parametrize(
    ("expected", "output", "found"),
    [
        (["a", "b"], ["x", "a", "b"], True),
        (["a", "b"], ["a", "x", "b"], False),
        (["a", "...", "b"], ["a", "x", "b"], True),
        (["b", "...", "a"], ["a", "b"], False),
        (["...", "a"], ["b"], False),
        ([], ["x"], True),
    ],
)
def test_expected_lines_are_compared(expected: list[str], output: list[str], found: bool) -> None:
    assert stands_in(expected, output) is found


def test_blocks_are_read_where_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n\n```python\na = 1\n```\n\n```text file=x.cfg\nb\n```\n\n```python no-run\nc\n```\n\n"
        "```console run\n$ d\ne\n$ f\n```\n\n```console\n$ g\n```\n"
    )
    assert python_of(page).splitlines()[3] == "a = 1"
    assert "c" not in python_of(page)
    assert files_of(page) == {"x.cfg": "b\n"}
    assert commands_of(page) == [("d", ["e"]), ("f", [])]
