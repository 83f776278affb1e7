"""create, train, restore: what is promised about models, files and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nets.checks import same_state, snapshot
from nets.retrain import DeepNet, SmallNet, channels_config, create, settle_, written
from openwork.torch import (
    analyze,
    create_prune_retrain_model,
    prune,
    restore_prune_retrain_model,
    verify,
)
from openwork.torch.retrain.records import plan_from_record

IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def train_a_step(model: nn.Module, inputs: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("build", "inputs"), [(SmallNet, IMAGE), (DeepNet, torch.randn(3, 2, 16, 16))])
def test_restores_in_a_fresh_process(build: type[nn.Module], inputs: Tensor, tmp_path: Path) -> None:
    pruned, _ = create(settle_(build()), inputs, tmp_path, channels_config(0.5))
    train_a_step(pruned, inputs)
    torch.save({"epoch": 1, "net": pruned.state_dict()}, tmp_path / "w.pth")
    torch.save(inputs, tmp_path / "inputs.pt")
    with torch.no_grad():
        torch.save(pruned.eval()(inputs), tmp_path / "outputs.pt")
    script = f"""
import torch
from nets.retrain import {build.__name__}
import openwork.torch as amct
inputs = torch.load("inputs.pt")
restored = amct.restore_prune_retrain_model(
    {build.__name__}(), inputs, "record.txt", "prune.cfg", "w.pth", state_dict_name="net")
assert restored.training and type(restored) is {build.__name__}
with torch.no_grad():
    assert torch.equal(restored.eval()(inputs), torch.load("outputs.pt"))
print("equal")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_same_class_same_keys_train_mode_and_smaller_tensors(tmp_path: Path) -> None:
    model = SmallNet().eval()
    pruned, _ = create(model, IMAGE, tmp_path, channels_config(0.5))
    assert type(pruned) is SmallNet
    assert all(module.training for module in pruned.modules())
    assert list(pruned.state_dict()) == list(model.state_dict())
    assert {name: tuple(t.shape) for name, t in pruned.state_dict().items() if t.dim()} == {
        "conv1.weight": (10, 3, 3, 3), "conv1.bias": (10,),
        "bn1.weight": (10,), "bn1.bias": (10,), "bn1.running_mean": (10,), "bn1.running_var": (10,),
        "conv2.weight": (12, 10, 3, 3),
        "bn2.weight": (12,), "bn2.bias": (12,), "bn2.running_mean": (12,), "bn2.running_var": (12,),
        "conv3.weight": (16, 12, 3, 3), "conv3.bias": (16,),
        "fc1.weight": (24, 16), "fc1.bias": (24,), "fc2.weight": (10, 24), "fc2.bias": (10,),
    }  # fmt: skip
    assert (pruned.conv2.in_channels, pruned.conv2.out_channels, pruned.bn2.num_features) == (10, 12, 12)


@pytest.mark.parametrize("training", [False, True])
def test_given_model_is_not_touched(training: bool, tmp_path: Path) -> None:
    model = settle_(SmallNet()).train(training)
    model.bn1.eval()  # a norm that the user has frozen
    before, text = snapshot(model), repr(model)
    flags = [module.training for module in model.modules()]
    pointers = [tensor.data_ptr() for tensor in model.parameters()]
    pruned, _ = create(model, IMAGE, tmp_path, channels_config(0.5))
    train_a_step(pruned, IMAGE)
    assert same_state(before, snapshot(model))
    assert repr(model) == text
    assert [module.training for module in model.modules()] == flags
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_pruned_model_is_on_its_own(tmp_path: Path) -> None:
    """Layers that lose nothing are copied too, not shared with the given model."""
    model = SmallNet()
    pruned, _ = create(model, IMAGE, tmp_path, channels_config(0.5))
    storages = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert not storages & {tensor.data_ptr() for tensor in (*pruned.parameters(), *pruned.buffers())}


def test_pruned_model_means_the_masked_original(tmp_path: Path) -> None:
    model = settle_(SmallNet()).eval()
    pruned, record = create(model, IMAGE, tmp_path, channels_config(0.5))
    assert verify(model, pruned, plan_from_record(record, model), IMAGE) < 1e-5


def test_random_state_is_not_moved(tmp_path: Path) -> None:
    model = SmallNet()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    create(model, IMAGE, tmp_path, channels_config(0.5))
    assert torch.equal(torch.rand(3), expected)


def test_same_input_same_result(tmp_path: Path) -> None:
    model = SmallNet()
    first, _ = create(model, IMAGE, tmp_path, channels_config(0.5))
    text = (tmp_path / "record.txt").read_bytes()
    second, _ = create(model, (IMAGE,), tmp_path, channels_config(0.5))
    assert (tmp_path / "record.txt").read_bytes() == text
    assert same_state(snapshot(first), snapshot(second))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_keys_of_a_wrapper(prefix: str, tmp_path: Path) -> None:
    pruned, _ = create(SmallNet(), IMAGE, tmp_path, channels_config(0.5))
    torch.save({prefix + key: value for key, value in pruned.state_dict().items()}, tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        SmallNet(), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    assert same_state(snapshot(pruned), snapshot(restored))


def test_model_whose_own_keys_begin_with_module(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = SmallNet()

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    pruned, _ = create(Holder(), IMAGE, tmp_path, channels_config(0.5))
    for prefix in ("", "module."):
        torch.save({prefix + key: value for key, value in pruned.state_dict().items()}, tmp_path / "w.pth")
        restored = restore_prune_retrain_model(
            Holder(), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
        )
        assert same_state(snapshot(pruned), snapshot(restored))


def test_structure_comes_from_the_record_alone(tmp_path: Path) -> None:
    """Restoring neither runs nor analyses the model, and another ratio in the config changes nothing."""
    pruned, _ = create(SmallNet(), IMAGE, tmp_path, channels_config(0.5))
    torch.save(pruned.state_dict(), tmp_path / "w.pth")

    class NeverRun(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("restore runs the model")

    config = written(tmp_path, channels_config(0.25), "other.cfg")
    restored = restore_prune_retrain_model(NeverRun(), IMAGE, tmp_path / "record.txt", config, tmp_path / "w.pth")
    assert same_state(snapshot(pruned), snapshot(restored))


def test_model_built_without_memory_gets_the_weights_of_the_file(tmp_path: Path) -> None:
    pruned, _ = create(SmallNet(), IMAGE, tmp_path, channels_config(0.5))
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    with torch.device("meta"):
        empty = SmallNet()
    restored = restore_prune_retrain_model(
        empty, IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    with torch.no_grad():
        assert torch.equal(restored.eval()(IMAGE), pruned.eval()(IMAGE))


def test_pruning_twice_composes(tmp_path: Path) -> None:
    model = settle_(SmallNet())
    once, _ = create(model, IMAGE, tmp_path, channels_config(0.5))
    (tmp_path / "record.txt").rename(tmp_path / "first.txt")
    twice, _ = create(once, IMAGE, tmp_path, channels_config(0.5))
    assert [twice.conv1.out_channels, twice.conv2.out_channels, twice.fc1.out_features] == [5, 6, 12]
    torch.save(once.state_dict(), tmp_path / "once.pth")
    torch.save(twice.state_dict(), tmp_path / "twice.pth")
    config = tmp_path / "prune.cfg"
    base = restore_prune_retrain_model(SmallNet(), IMAGE, tmp_path / "first.txt", config, tmp_path / "once.pth")
    again = restore_prune_retrain_model(base, IMAGE, tmp_path / "record.txt", config, tmp_path / "twice.pth")
    with torch.no_grad():
        assert torch.equal(again.eval()(IMAGE), twice.eval()(IMAGE))


def test_native_prune_keeps_the_flag_of_each_module() -> None:
    model = SmallNet().train()
    model.bn1.eval()
    smaller, plan = prune(model, IMAGE, ratio=0.5)
    for result in (smaller, plan.apply(model)):
        assert [m.training for m in result.modules()] == [m.training for m in model.modules()]


def test_plan_of_plan_composes() -> None:
    model = settle_(SmallNet()).eval()
    once, first = prune(model, IMAGE, ratio=0.5)
    twice, second = prune(once, IMAGE, ratio=0.5)
    rebuilt = second.apply(first.apply(model))
    assert same_state(snapshot(rebuilt), snapshot(twice))
    assert verify(once, twice, second, IMAGE) < 1e-5
    assert analyze(twice, IMAGE).params < analyze(once, IMAGE).params


def test_documented_script_with_only_the_import_changed(tmp_path: Path) -> None:
    """The order of calls that AMCT's guide shows: level, create, train, save, restore, export."""
    script = """
import os
import torch
import openwork.torch as amct
from nets.retrain import SmallNet

CONFIG = "config/channel_prune.cfg"
RECORD = "outputs/record.txt"
CHECKPOINT = "outputs/model_best.pth"


def train(model, batches):
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()


def main():
    amct.set_logging_level(print_level="info", save_level="info")
    model = SmallNet()
    input_data = (torch.randn(4, 3, 16, 16),)
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(3)]
    train(model, batches)
    prune_retrain_model = amct.create_prune_retrain_model(model, input_data, CONFIG, RECORD)
    train(prune_retrain_model, batches)
    torch.save({"state_dict": prune_retrain_model.state_dict()}, CHECKPOINT)
    restored = amct.restore_prune_retrain_model(
        SmallNet(), input_data, RECORD, CONFIG, CHECKPOINT, "state_dict")
    restored.eval()
    amct.save_prune_retrain_model(
        restored, "outputs/small", input_data, input_names=["input"], output_names=["output"],
        dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}})
    print(prune_retrain_model.conv1.out_channels, sorted(os.listdir("outputs")))


if __name__ == "__main__":
    main()
"""
    (tmp_path / "config").mkdir()
    written(tmp_path / "config", channels_config(0.5), "channel_prune.cfg")
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    files = ["model_best.pth", "record.txt", "small_deploy_model.onnx", "small_fake_quant_model.onnx"]
    assert done.stdout == f"10 {files}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "outputs", "script.py"]
    # The level was info: each group is reported on stderr, and nothing else is.
    lines = done.stderr.splitlines()
    assert "INFO openwork: conv1: 10 of 20 channels stay" in lines
    assert all(line.startswith("INFO openwork: ") for line in lines), done.stderr


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    config = Path(written(tmp_path, channels_config(0.5)))
    pruned = create_prune_retrain_model(SmallNet(), IMAGE, config, tmp_path / "new" / "record.txt")
    assert pruned.conv1.out_channels == 10
    assert (tmp_path / "new" / "record.txt").is_file()
