"""The demo with a TensorFlow graph, cut short; its figures are checked against what the files themselves say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import onnx
import onnxruntime
import torch
from click.testing import CliRunner
from torch.nn import functional

from openwork.demo.digits import load_arrays
from openwork.demo_tensorflow import command as demo_command
from openwork.errors import FileError, OpenworkError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo")
    arguments = [sys.executable, "-m", "openwork", "demo-tf", "--epochs", "1", "--rounds", "4"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    return folder, done


def test_it_ends_with_the_table_and_writes_only_its_folder(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = demo
    assert done.returncode == 0, done.stderr
    for row in ("accuracy (test)", "parameters", "MACs, one image", "ONNX file", "latency, one image"):
        assert row in done.stdout
    assert os.listdir(folder) == ["openwork-demo-tf"]
    assert {"dense.pb", "pruned.pb", "pruned.onnx", "prune.cfg", "record.txt", "report.html", "results.json"} <= set(
        os.listdir(folder / "openwork-demo-tf")
    )


def test_figures_are_those_of_the_files(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = demo[0] / "openwork-demo-tf"
    results = json.loads((folder / "results.json").read_text())
    digits = load_arrays()
    for name in ("dense", "pruned"):
        path = folder / f"{name}.onnx"
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {session.get_inputs()[0].name: digits.test_images[..., None]})
        assert results[name]["accuracy"] == pytest.approx((logits.argmax(1) == digits.test_labels).mean())
        assert results[name]["bytes"] == path.stat().st_size
        filters = [t for t in onnx.load(path).graph.initializer if len(t.dims) == 4]
        assert len(filters) >= 21
    assert results["masked_equivalence"] < 1e-4
    assert results["pruned"]["macs"] <= results["dense"]["macs"] / 2
    # 16 x 16, 8 x 8 and 4 x 4 positions: stem, blocks, shortcuts, head.
    full = 256 * 9 * 16 + 6 * 256 * 9 * 256 + 64 * 9 * (16 * 32 + 5 * 32 * 32) + 16 * 9 * (32 * 64 + 5 * 64 * 64)
    assert results["dense"]["macs"] == full + 64 * 16 * 32 + 16 * 32 * 64 + 640


def test_digits_are_enlarged_as_torch_enlarges() -> None:
    digits = load_arrays()
    random = np.random.default_rng(0).standard_normal((5, 8, 8), dtype=np.float32)
    from openwork.demo.digits import _doubled

    large = functional.interpolate(torch.from_numpy(random)[:, None], size=(16, 16), mode="bilinear")[:, 0]
    np.testing.assert_allclose(_doubled(random), large.numpy(), atol=1e-6)
    assert digits.train_images.dtype == np.float32
    assert len(digits.test_labels) == 360


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name == "tf2onnx" else object())
    with pytest.raises(OpenworkError, match=r'the demo needs tf2onnx, .* pip install "openwork\[demo-tf\]"'):
        demo_command.check_installed()
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a file; a folder is needed"):
        CliRunner().invoke(demo_command.command, ["--output", str(tmp_path / "file")], catch_exceptions=False)
