"""What save writes: checked by onnx, run by onnxruntime, compared with torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from nets.retrain import DeepNet, GroupSums, SmallNet, channels_config, create, settle_
from openwork.errors import ConfigError, FileError, ModelError
from openwork.torch import save_prune_retrain_model
from openwork.torch.retrain import export

IMAGE = torch.randn(2, 3, 16, 16)
BOTH = ["m_deploy_model.onnx", "m_fake_quant_model.onnx"]


class TinyTransformer(nn.Module):
    """Patches, two attention blocks with LayerNorm and GELU, a class head; input [n, 3, 16, 16]."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            n, t, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.proj(y.transpose(1, 2).reshape(n, t, c))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.place = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        self.blocks = nn.Sequential(self.Block(32, 4), self.Block(32, 4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


def pruned(build: type[nn.Module], inputs: Any, folder: Path) -> nn.Module:
    torch.manual_seed(2)
    model, _ = create(settle_(build()), inputs, folder, channels_config(0.5))
    return model.eval()


def check(path: Path, model: nn.Module, *inputs: Tensor) -> onnx.ModelProto:
    """The file is right for onnx.checker, and onnxruntime answers what torch does."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {slot.name: tensor.numpy() for slot, tensor in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        expected = model.eval()(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, theirs in zip(session.run(None, given), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)
    return onnx.load(path)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(SmallNet, (2, 3, 16, 16)), (GroupSums, (1, 16, 28, 28)), (DeepNet, (2, 2, 16, 16)),
     (TinyTransformer, (2, 3, 16, 16))],
)  # fmt: skip
def test_both_files_mean_what_the_model_means(build: type[nn.Module], shape: tuple[int, ...], tmp_path: Path) -> None:
    inputs = torch.randn(shape)
    model = pruned(build, inputs, tmp_path)
    save_prune_retrain_model(model, str(tmp_path / "onnx" / "m"), inputs)
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == BOTH
    for name in BOTH:
        proto = check(tmp_path / "onnx" / name, model, inputs)
        assert not any(tensor.external_data for tensor in proto.graph.initializer)


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 20])
def test_opset_is_the_one_asked_for(opset: int, tmp_path: Path) -> None:
    model = pruned(SmallNet, IMAGE, tmp_path)
    save_prune_retrain_model(model, tmp_path / "m", IMAGE, opset=opset)
    for name in BOTH:
        proto = check(tmp_path / name, model, IMAGE)
        assert {item.version for item in proto.opset_import if item.domain in ("", "ai.onnx")} == {opset}


@pytest.mark.parametrize("opset", [13, 18, 20])
@pytest.mark.parametrize("axes", [{0: "batch"}, [0]])
def test_names_and_dynamic_axes(opset: int, axes: Any, tmp_path: Path) -> None:
    model = pruned(SmallNet, IMAGE, tmp_path)
    save_prune_retrain_model(
        model, tmp_path / "m", IMAGE, ["image"], ["scores"], {"image": axes, "scores": axes}, opset=opset
    )
    for name in BOTH:
        proto = onnx.load(tmp_path / name)
        assert [item.name for item in proto.graph.input] == ["image"]
        assert [item.name for item in proto.graph.output] == ["scores"]
        dims = proto.graph.input[0].type.tensor_type.shape.dim
        assert dims[0].dim_param
        assert [dim.dim_value for dim in dims[1:]] == [3, 16, 16]
        if isinstance(axes, dict):
            assert dims[0].dim_param == "batch"
        for batch in (1, 2, 7):
            check(tmp_path / name, model, torch.randn(batch, 3, 16, 16))


def test_two_inputs_and_two_outputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            z = self.c(self.a(x) + self.b(y))
            return z, z.mean((2, 3))

    inputs = (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8))
    model = pruned(Two, inputs, tmp_path)
    save_prune_retrain_model(model, tmp_path / "m", inputs, ["x", "y"], ["map", "mean"])
    check(tmp_path / BOTH[0], model, *inputs)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("deep/er/net", ["deep/er/net_deploy_model.onnx", "deep/er/net_fake_quant_model.onnx"]),
        ("folder/", ["folder/deploy_model.onnx", "folder/fake_quant_model.onnx"]),
        ("plain", ["plain_deploy_model.onnx", "plain_fake_quant_model.onnx"]),
        ("with.dots", ["with.dots_deploy_model.onnx", "with.dots_fake_quant_model.onnx"]),
    ],
)
def test_where_the_files_go(path: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pruned(SmallNet, IMAGE, tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    monkeypatch.chdir(target)
    save_prune_retrain_model(model, path, IMAGE)
    assert sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()) == names


def test_existing_files_are_replaced_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = pruned(SmallNet, IMAGE, tmp_path)
    (tmp_path / BOTH[0]).write_text("old")
    with caplog.at_level(logging.WARNING, "openwork"):
        save_prune_retrain_model(model, tmp_path / "m", IMAGE)
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / BOTH[0]} existed and was replaced"]
    check(tmp_path / BOTH[0], model, IMAGE)


def test_training_flags_and_weights_are_left_alone(tmp_path: Path) -> None:
    model = pruned(SmallNet, IMAGE, tmp_path).train()
    model.bn1.eval()
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_prune_retrain_model(model, tmp_path / "m", IMAGE)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


class Interrupted(nn.Module):
    """Forward raises what it is told to."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.forwards, self.good = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.error is not None and self.forwards > self.good:
            raise self.error
        return self.conv(x)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("error", "expected"), [(KeyboardInterrupt(), KeyboardInterrupt), (OverflowError("too much"), ModelError)]
)
@pytest.mark.parametrize("good", [0, 1], ids=["at once", "in the export"])
def test_nothing_half_written(
    good: int, opset: int, error: BaseException, expected: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / BOTH[1]).write_text("old")
    model = Interrupted().train()
    model.error, model.good = error, good
    with pytest.raises(expected) as caught:
        save_prune_retrain_model(model, tmp_path / "m", IMAGE, opset=opset)
    if expected is ModelError:
        words = "Interrupted cannot be exported to ONNX" if good else "the forward of Interrupted fails on input_data"
        assert words in str(caught.value)
        assert "too much" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert model.training
    assert [path.name for path in tmp_path.iterdir()] == [BOTH[1]]
    assert (tmp_path / BOTH[1]).read_text() == "old"


def test_interrupted_between_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files are whole before the first one appears."""
    seen: list[list[str]] = []

    def stop(path: str) -> None:
        seen.append(sorted(p.name for p in tmp_path.iterdir() if p.is_file()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(onnx.checker, "check_model", stop)
    with pytest.raises(KeyboardInterrupt):
        save_prune_retrain_model(Interrupted(), tmp_path / "m", IMAGE)
    assert seen == [[], []]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [6, 99, True, "18", 18.0])
def test_opset_that_does_not_exist(opset: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"opset is .*; allowed: 7 to"):
        save_prune_retrain_model(Interrupted(), tmp_path / "m", IMAGE, opset=opset)
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError, match=r"save_path .*file/sub/m_deploy_model\.onnx cannot be written"):
        save_prune_retrain_model(Interrupted(), tmp_path / "file" / "sub" / "m", IMAGE)
    (tmp_path / BOTH[0]).mkdir()
    with pytest.raises(FileError, match="is a folder"):
        save_prune_retrain_model(Interrupted(), tmp_path / "m", IMAGE)


def test_weights_beside_the_file_only_when_they_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        large, small = nn.Linear(23_000, 23_000), nn.Linear(21_000, 21_000)
    assert export.needs_external_data(large)
    assert not export.needs_external_data(small)
    # The same path with the limit within reach.
    monkeypatch.setattr(export, "LARGEST_FILE", 1000)
    model = pruned(SmallNet, IMAGE, tmp_path)
    save_prune_retrain_model(model, tmp_path / "out" / "m", IMAGE)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted([*BOTH, *(f"{name}.data" for name in BOTH)])
    for name in BOTH:
        check(tmp_path / "out" / name, model, IMAGE)


@pytest.mark.parametrize("opset", [13, 18])
def test_silent(opset: int, tmp_path: Path) -> None:
    script = f"""
import torch
from nets.retrain import SmallNet
import openwork.torch as amct
amct.save_prune_retrain_model(SmallNet(), "m", torch.randn(1, 3, 16, 16), opset={opset},
                              input_names=["x"], dynamic_axes={{"x": {{0: "n"}}}})
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_from_two_threads(tmp_path: Path) -> None:
    models = [pruned(SmallNet, IMAGE, tmp_path), pruned(DeepNet, torch.randn(2, 2, 16, 16), tmp_path)]
    inputs = [IMAGE, torch.randn(2, 2, 16, 16)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            save_prune_retrain_model(models[index], tmp_path / f"{index}/m", inputs[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for index in range(2):
        check(tmp_path / f"{index}" / BOTH[0], models[index], inputs[index])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dynamic_axes": {"nope": {0: "n"}}}, "dynamic_axes: 'nope' is in neither input_names nor output_names"),
        ({"input_names": ["a"], "dynamic_axes": {"x": {0: "n"}}}, "dynamic_axes: 'x' is in neither"),
        ({"input_names": ["a"], "dynamic_axes": {"a": {7: "n"}}}, "dynamic_axes['a']: 7 is no axis; allowed: 0 to 3"),
        ({"input_names": ["a"], "dynamic_axes": {"a": [-1]}}, "-1 is no axis"),
        ({"input_names": ["a"], "dynamic_axes": {"a": 0}}, "{axis: name} or [axes] is needed"),
        ({"dynamic_axes": ["a"]}, "dynamic_axes is a list; a dict is needed"),
        ({"input_names": ["a", "b"]}, "input_names has 2 names; the model is given 1 tensor"),
        ({"output_names": ["a", "b"]}, "output_names has 2 names; the model returns 1 tensor"),
        ({"input_names": "a"}, "input_names is 'a'; a list of names is needed"),
        ({"input_names": [3]}, "a list of names is needed"),
        ({"input_names": ["a"], "output_names": ["a"]}, "'a' is in input_names and in output_names"),
    ],
)
def test_names_that_are_not_there(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        save_prune_retrain_model(SmallNet(), tmp_path / "m", IMAGE, **options)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [17, 18])
def test_axes_by_the_name_of_a_parameter_of_forward(opset: int, tmp_path: Path) -> None:
    name = next(iter(__import__("inspect").signature(SmallNet().forward).parameters))
    save_prune_retrain_model(SmallNet(), tmp_path / "m", IMAGE, dynamic_axes={name: {0: "n"}}, opset=opset)
    assert (tmp_path / BOTH[0]).exists()
