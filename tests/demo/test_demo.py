"""The demo as a user runs it, cut short; its figures are checked against what the files themselves say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from openwork.demo import command as demo_command
from openwork.demo.console import progress
from openwork.demo.data import load_digits
from openwork.demo.measure import latencies
from openwork.demo.network import ResNet20
from openwork.errors import FileError, OpenworkError

FILES = {
    "dense.pth", "dense_deploy_model.onnx", "dense_fake_quant_model.onnx", "prune.cfg", "pruned.pth",
    "pruned_deploy_model.onnx", "pruned_fake_quant_model.onnx", "record.txt", "results.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo")
    arguments = [sys.executable, "-m", "openwork", "demo", "--epochs", "1", "--rounds", "4"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    return folder, done


def elements(path: Path) -> int:
    model = onnx.load(path)
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer if tensor.data_type == 1)


def test_demo_ends_with_the_table_and_writes_only_its_folder(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = demo
    assert done.returncode == 0, done.stderr
    for row in ("accuracy (test)", "parameters", "MACs, one image", "ONNX file", "latency, one image"):
        assert row in done.stdout
    assert os.listdir(folder) == ["openwork-demo"]
    assert set(os.listdir(folder / "openwork-demo")) == FILES


def test_no_progress_bar_without_a_terminal(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    assert "training" not in demo[1].stderr
    assert "\x1b" not in demo[1].stdout


def test_figures_are_those_of_the_files(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = demo[0] / "openwork-demo"
    results = json.loads((folder / "results.json").read_text())
    digits = load_digits()
    for name in ("dense", "pruned"):
        path = folder / f"{name}_deploy_model.onnx"
        assert results[name]["bytes"] == path.stat().st_size
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {"image": digits.test_images.numpy()})
        assert results[name]["accuracy"] == pytest.approx((logits.argmax(1) == digits.test_labels.numpy()).mean())
        state = torch.load(folder / f"{name}.pth", weights_only=True)
        trainable = sum(t.numel() for key, t in state.items() if "running" not in key and "num_batches" not in key)
        assert results[name]["parameters"] == trainable
        assert results[name]["error"] < 1e-5
    assert results["masked_equivalence"] < 1e-5
    # Half of the input and half of the output channels: nearly all cost is in such layers.
    assert 3.8 < results["dense"]["macs"] / results["pruned"]["macs"] < 4.0
    assert elements(folder / "pruned_deploy_model.onnx") < 0.3 * elements(folder / "dense_deploy_model.onnx")


def test_macs_of_the_dense_network_by_hand(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    macs = 9 * 16 * 16**2  # the stem reads one channel
    width, side = 16, 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        side //= stride
        for index in range(3):
            inputs = width if index == 0 else outputs
            macs += 9 * (inputs + outputs) * outputs * side**2
            if inputs != outputs:
                macs += inputs * outputs * side**2
        width = outputs
    macs += 64 * 10
    results = json.loads((demo[0] / "openwork-demo" / "results.json").read_text())
    assert results["dense"]["macs"] == macs


def test_digits_are_split_once_and_by_class() -> None:
    first, second = load_digits(), load_digits()
    assert torch.equal(first.test_images, second.test_images)
    assert len(first.train_images) + len(first.test_images) == 1797
    assert first.train_images.shape[1:] == (1, 16, 16)
    counts = torch.bincount(first.test_labels).double() / torch.bincount(first.train_labels).double()
    assert counts.min() > 0.22
    assert counts.max() < 0.28


def test_network_has_twenty_layers_on_its_longest_path() -> None:
    names = [
        name for name, module in ResNet20().named_modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear))
    ]
    assert len([name for name in names if "shortcut" not in name]) == 20


def test_missing_scikit_learn_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = demo_command.find_spec
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name == "sklearn" else found(name))
    with pytest.raises(OpenworkError, match=r'scikit-learn, which is not installed; .*pip install "openwork\[demo\]"'):
        demo_command.check_installed()


def test_output_that_is_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = CliRunner().invoke(demo_command.command, ["--output", str(tmp_path / "taken")])
    assert isinstance(result.exception, FileError)
    assert (tmp_path / "taken").read_text() == "mine"


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("step", 2) as advance:
        advance(1)
        advance(2)
    assert capsys.readouterr() == ("", "")


def test_latencies_run_both_in_turn() -> None:
    calls: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, images: np.ndarray) -> np.ndarray:
            calls.append(self.name)
            return images

    first, second, ratio = latencies(Recorder("a"), Recorder("b"), np.zeros(1, np.float32), 5, "timing")  # type: ignore[arg-type]
    assert calls == ["a", "b"] * (len(calls) // 2)
    assert len(calls) >= 10
    assert min(first, second, ratio) > 0
