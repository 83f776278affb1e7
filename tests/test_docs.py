"""The documentation runs: its Python blocks, the console blocks marked ``run``, and its links.

Convention, for README.md, ARCHITECTURE.md, CHANGELOG.md and docs/*.md. What runs of a page runs in order, in one
process and in a folder that is empty at first; the Python blocks share their names.

- Every block that opens with ```python is run. ```python no-run is shown only; give the reason beside it.
- A comment that opens with <!-- run is Python as well: what the blocks need and a reader does not.
- A block that opens with ```text file=NAME is written to NAME before anything runs.
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
RUNNING = re.compile(
    r"^(?P<opening>```python|```console run|<!-- run)\n(?P<body>.*?)^(?:```|-->)\s*$", re.MULTILINE | re.DOTALL
)

# Imported by every Python process that a page starts.
STUB = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "torch")!r})
from nets.vision import allow_torchvision
allow_torchvision()
sys.path.pop(0)
"""

# Runs a page: its script has line numbers of the page, so that errors name them.
DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import test_docs
page = test_docs.Path({page!r})
names = {{"__name__": "documentation", "run_console": test_docs.run_console}}
exec(compile(test_docs.script_of(page), page.name, "exec"), names)
"""


def script_of(page: Path) -> str:
    """What runs of a page as one Python script; every line stands where it stands on the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in RUNNING.finditer(text):
        first = text.count("\n", 0, match.start("body"))
        body = match["body"].splitlines()
        if match["opening"] == "```console run":
            body = [f"run_console({match['body']!r})"]
        lines[first : first + len(body)] = body
    return "\n".join(lines)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows."""
    found = {}
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        name = re.fullmatch(r"text file=(\S+)", match["info"].strip())
        if name:
            found[name[1]] = match["body"]
    return found


def commands_of(block: str) -> list[tuple[str, list[str]]]:
    """(command, expected lines) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def run_console(block: str) -> None:
    """Run the commands of a console block and compare what they print."""
    for command, expected in commands_of(block):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
        assert stands_in(expected, done.stdout.splitlines()), f"{command} prints:\n{done.stdout}"


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


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page).strip()], ids=name_of)
def test_pages_run(page: Path, tmp_path: Path) -> None:
    stub, folder = tmp_path / "stub", tmp_path / "page"
    stub.mkdir()
    folder.mkdir()
    (stub / "sitecustomize.py").write_text(STUB)
    for name, content in files_of(page).items():
        (folder / name).write_text(content)
    environment = {
        **os.environ,
        "PYTHONPATH": str(stub),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "COLUMNS": "200",
    }
    code = DRIVER.format(tests=str(Path(__file__).parent), page=str(page))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]


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


def test_readme_leads_to_every_page() -> None:
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/pruning.md", "docs/amct.md", "docs/files.md"} <= names
    readme = (ROOT / "README.md").read_text()
    missing = {name for name in names if f"({name})" not in readme} - {"README.md"}
    assert not missing


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
        "```console run\n$ d\ne\n$ f\n```\n\n```console\n$ g\n```\n\n<!-- run\nh = 2\n-->\n"
    )
    lines = script_of(page).splitlines()
    assert {index: line for index, line in enumerate(lines) if line} == {
        3: "a = 1",
        15: "run_console('$ d\\ne\\n$ f\\n')",
        25: "h = 2",
    }
    assert files_of(page) == {"x.cfg": "b\n"}
    assert commands_of("$ d\ne\n$ f\n") == [("d", ["e"]), ("f", [])]


@pytest.mark.parametrize("command", ["exit 3", "echo other"])
def test_a_command_that_fails_or_prints_something_else_is_noticed(command: str) -> None:
    with pytest.raises(AssertionError, match=command):
        run_console(f"$ {command}\nsomething\n")
