"""The command `openwork` as a process: instant help, one-line errors."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from openwork.cli import _COMMANDS, _SUMMARIES, _cli

FRAMEWORKS = ("torch", "numpy", "onnx", "onnxruntime", "tensorflow", "sklearn")

# Runs the command line in a process in which some packages cannot be imported.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from openwork.cli import main
main({arguments!r})
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_every_command_has_its_line_in_the_help() -> None:
    assert set(_SUMMARIES) == set(_COMMANDS)


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_commands_load_and_have_help(name: str) -> None:
    command = _cli.get_command(click.Context(_cli), name)
    assert command is not None
    assert command.name == name
    assert command.help
    assert command.get_short_help_str()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_needs_no_framework(arguments: list[str]) -> None:
    done = run(BLOCKED.format(blocked=FRAMEWORKS, arguments=arguments))
    assert done.returncode == 0, done.stderr
    assert "openwork" in done.stdout
    if arguments == ["--help"]:
        assert all(name in done.stdout for name in _COMMANDS)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("torch", ["analyze", "a:b", "--input", "1"], "openwork[torch]"),
        ("onnx", ["inspect", "--model", "m.onnx"], "openwork[onnx]"),
        ("sklearn", ["demo"], "openwork[demo]"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    missing: str, arguments: list[str], extra: str
) -> None:
    code = BLOCKED.format(blocked=(missing,), arguments=arguments)
    if missing == "sklearn":  # the demo asks for the packages without importing them
        code = code.replace('raise ModuleNotFoundError(f"No module named {name!r}", name=name)', "raise SystemExit(9)")
        code = (
            "import importlib.util as u\nf = u.find_spec\nu.find_spec = lambda n: None if n == 'sklearn' else f(n)\n"
            + code
        )
    done = run(code)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("openwork: error: ")
    assert f'pip install "{extra}"' in line


def test_an_expected_error_is_one_line_and_exit_code_1() -> None:
    done = run("from openwork.cli import main; main(['analyze', 'nothing', '--input', '1'])")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "'nothing'" in line
    assert "package.module:function" in line


def test_python_m_openwork_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "openwork", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("openwork")
