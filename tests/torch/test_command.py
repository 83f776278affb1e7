"""``openwork analyze``: the table, and what happens with bad arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from openwork.cli import main
from openwork.errors import ConfigError, ModelError, OpenworkError, UnsupportedModelError
from openwork.torch.command import build, command, parse_shape

SMALL = "nets.retrain:SmallNet"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), prog_name="openwork analyze")


def test_table_names_groups_and_what_is_frozen() -> None:
    result = run(SMALL, "--input", "1,3,16,16")
    assert result.exit_code == 0, result.output
    for word in ("SmallNet", "conv1", "conv2", "conv3", "fc1", "20", "24", "32", "48"):
        assert word in result.output
    # The two ends: what comes in and what the caller sees.
    assert "fc2" in result.output
    assert "caller sees" in result.output


def test_shape_may_be_written_with_x() -> None:
    assert run(SMALL, "--input", "1x3x16x16").output == run(SMALL, "--input", "1,3,16,16").output


def test_several_inputs_and_integers() -> None:
    assert run("test_command_models:TwoInputs", "--input", "2,4", "--input", "2,6").exit_code == 0
    assert run("test_command_models:Tokens", "--input", "2,5", "--integers").exit_code == 0


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_command_models.py").write_text(
        """
import torch
from torch import nn


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x, y):
        return self.c(self.a(x) + self.b(y))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.embed(x))


class Needs(nn.Linear):
    pass


class Holder:
    Inner = Tokens


def pretrained(weights="IMAGENET"):
    assert weights is None, "weights would be fetched"
    return TwoInputs()


number = 3


def fails():
    raise KeyError("key")


def no_model():
    return 5
"""
    )
    (tmp_path / "test_command_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_build_fetches_no_weights_and_follows_dots() -> None:
    assert type(build("test_command_models:pretrained")).__name__ == "TwoInputs"
    assert type(build("test_command_models:Holder.Inner")).__name__ == "Tokens"


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("torchvision.models", ConfigError, ["'torchvision.models'", "package.module:function"]),
        (":resnet18", ConfigError, ["package.module:function"]),
        ("torch:", ConfigError, ["package.module:function"]),
        ("no_such_package:net", ConfigError, ["'no_such_package'", "cannot be imported"]),
        ("nets.retrain:SmalNet", ConfigError, ["no 'SmalNet'", "'SmallNet'"]),
        ("test_command_models:number", ConfigError, ["is a int", "function or class"]),
        ("test_command_broken:Net", ConfigError, ["cannot be imported", "ZeroDivisionError"]),
        ("test_command_models:fails", ModelError, ["cannot be built", "KeyError: 'key'"]),
        ("test_command_models:Needs", ModelError, ["cannot be built without arguments", "in_features"]),
    ],
)
def test_target_that_builds_nothing(target: str, kind: type[OpenworkError], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        build(target)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "1,3,x", "1,,3", "0,3", "-1,3,4", "1.5,2", "3,"])
def test_shape_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--input is .*comma-separated"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["test_command_models:no_model", "--input", "1,2"], UnsupportedModelError),
        ([SMALL, "--input", "1,4,16,16"], ModelError),
        ([SMALL, "--input", "1,3,16,16", "--input", "1"], ModelError),
    ],
)
def test_model_that_does_not_run(arguments: list[str], kind: type[OpenworkError]) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, kind)


@pytest.mark.parametrize("arguments", [[], [SMALL], ["--input", "1,3,16,16"], [SMALL, "--input", "1", "--inputs", "2"]])
def test_usage_errors(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage: openwork analyze" in result.output


def test_help_shows_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "openwork analyze torchvision.models:resnet18 --input 1,3,224,224" in result.output


def test_main_prints_one_line_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["analyze", SMALL, "--input", "1,4,16,16"])
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("openwork: error: the forward of conv1 (Conv2d) fails: ")
    assert captured.err.count("\n") == 1


def test_as_a_command() -> None:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "openwork", "analyze", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = call(SMALL, "--input", "1,3,16,16")
    assert (done.returncode, done.stderr) == (0, "")
    assert "conv1" in done.stdout
    done = call("nets.retrain:SmalNet", "--input", "1,3,16,16")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("openwork: error: model 'nets.retrain:SmalNet'")
    assert len(done.stderr.splitlines()) == 1
