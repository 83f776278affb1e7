"""Bad input: one clear line of the right class, and nothing half-written."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nets.retrain import SmallNet, channels_config, create, written
from openwork.errors import (
    ConfigError,
    FileError,
    ModelError,
    NothingToPruneError,
    OpenworkError,
    RecordError,
    UnsupportedModelError,
    WeightsError,
)
from openwork.torch import (
    create_compressed_retrain_model,
    create_prune_retrain_model,
    restore_prune_retrain_model,
    save_prune_retrain_model,
    set_logging_level,
)
from openwork.torch.retrain.weights import read_checkpoint

IMAGE = torch.randn(2, 3, 16, 16)


def refused(kind: type[OpenworkError], builtin: type[Exception], words: list[str], call: Any, *args: Any) -> None:
    with pytest.raises(kind) as caught:
        call(*args)
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def one(algorithm: str) -> str:
    return f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ {algorithm} }} }} }}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (one("prune_ratio: 0"), ["prune_config.filter_pruner.balanced_l2_norm_filter_prune: prune_ratio is 0"]),
        (one("prune_ratio: 1"), ["prune_ratio is 1", "greater than 0 and less than 1"]),
        (one("prune_ratio: -0.5"), ["prune_ratio is -0.5"]),
        (one("prune_ratio: 1.5"), ["prune_ratio is 1.5"]),
        (one("prune_ratio: nan"), ["prune_ratio is nan"]),
        (one("prune_ratio: inf"), ["prune_ratio is inf"]),
        (one(""), ["balanced_l2_norm_filter_prune", "prune_ratio is missing"]),
        (one('prune_ratio: "half"'), ["line 1", "prune_ratio"]),
        (one("prune_ratio: 0.5 prune_ratio: 0.6"), ["prune_ratio is given twice"]),
        (one("prune_ratoi: 0.5"), ["unknown field 'prune_ratoi'", "did you mean 'prune_ratio'"]),
        (one("prune_ratio: 0.5 ascend_optimized: maybe"), ["line 1", "ascend_optimized"]),
        ("prune_config { }", ["prune_config", "empty", "filter_pruner", "n_out_of_m_pruner"]),
        ("prune_config { filter_pruner { } }", ["filter_pruner", "empty", "balanced_l2_norm_filter_prune"]),
        (
            one("prune_ratio: 0.5").removesuffix("}") + "n_out_of_m_pruner { } }",
            ["filter_pruner", "n_out_of_m_pruner", "only one"],
        ),
        (one("prune_ratio: 0.5") * 2, ["prune_config is given twice"]),
        (one("prune_ratio: 0.5") + 'skip_layers: ""', ["skip_layers", "empty"]),
        ("prune_config { filter_pruner {", ["ends too early"]),
        (
            "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M8N4 } } }",
            ["n_out_of_m_type", "'M8N4'", "M4N2"],
        ),
    ],
)  # fmt: skip
def test_config_text(text: str, words: list[str], tmp_path: Path) -> None:
    refused(ConfigError, ValueError, ["prune.cfg", *words], create, SmallNet(), IMAGE, tmp_path, text)
    assert [path.name for path in tmp_path.iterdir()] == ["prune.cfg"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "batch_num: 2\n"])
def test_config_that_asks_for_nothing(text: str, tmp_path: Path) -> None:
    refused(NothingToPruneError, RuntimeError, ["prune.cfg", "nothing is pruned"], create, SmallNet(), IMAGE, tmp_path,
            text)  # fmt: skip


def test_everything_skipped(tmp_path: Path) -> None:
    text = channels_config(
        0.5, extra="".join(f'skip_layers: "{n}" ' for n in ("conv1", "conv2", "conv3", "fc1", "fc2"))
    )
    refused(NothingToPruneError, RuntimeError, ["skip_layers names 'conv1'"], create, SmallNet(), IMAGE, tmp_path, text)


def test_nothing_prunable(tmp_path: Path) -> None:
    words = ["'0' cannot lose channels", "the caller sees these channels"]
    for net in (nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())):
        refused(NothingToPruneError, RuntimeError, words, create, net, IMAGE, tmp_path, channels_config(0.5))
    words = ["no layer that can be pruned"]
    refused(NothingToPruneError, RuntimeError, words, create, nn.Sequential(nn.ReLU()), IMAGE, tmp_path,
            channels_config(0.5))  # fmt: skip


def test_config_file(tmp_path: Path) -> None:
    def run(path: Path) -> None:
        create_prune_retrain_model(SmallNet(), IMAGE, str(path), str(tmp_path / "record.txt"))

    refused(FileError, ValueError, ["config file", "absent.cfg does not exist"], run, tmp_path / "absent.cfg")
    refused(FileError, OSError, ["config file", "is a folder"], run, tmp_path)
    (tmp_path / "latin.cfg").write_bytes(b'skip_layers: "caf\xe9"')
    refused(FileError, ValueError, ["latin.cfg", "not UTF-8", "byte 17"], run, tmp_path / "latin.cfg")
    with open(tmp_path / "huge.cfg", "wb") as file:
        file.truncate(100 << 20)
    refused(FileError, ValueError, ["huge.cfg", "104,857,600 bytes", "at most"], run, tmp_path / "huge.cfg")
    assert not (tmp_path / "record.txt").exists()


def test_record_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    class NeverRun(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model is run although the record cannot be written")

    config = written(tmp_path, channels_config(0.5))
    refused(FileError, OSError, ["record_file", "is a folder"], create_prune_retrain_model, NeverRun(), IMAGE, config,
            str(tmp_path))  # fmt: skip
    target = os.path.join(config, "record.txt")
    refused(FileError, OSError, ["record_file", "cannot be written"], create_prune_retrain_model, NeverRun(), IMAGE,
            config, target)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A folder with record.txt, prune.cfg and w.pth of a pruned model, and that model."""
    pruned, _ = create(SmallNet(), IMAGE, tmp_path, channels_config(0.5))
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    return tmp_path, pruned


def restore(folder: Path, model: nn.Module | None = None, record: str = "record.txt", weights: str = "w.pth",
            name: str | None = None, config: str = "prune.cfg") -> nn.Module:  # fmt: skip
    return restore_prune_retrain_model(model or SmallNet(), IMAGE, str(folder / record), str(folder / config),
                                       str(folder / weights), name)  # fmt: skip


def test_record_file(saved: tuple[Path, nn.Module]) -> None:
    folder, _ = saved
    text = (folder / "record.txt").read_text()

    def edited(before: str, after: str) -> None:
        assert before in text
        written(folder, text.replace(before, after, 1), "bad.txt")
        restore(folder, record="bad.txt")

    refused(
        FileError,
        ValueError,
        ["record file", "absent.txt does not exist"],
        lambda: restore(folder, record="absent.txt"),
    )
    for size in (len(text) // 3, len(text) // 2, len(text) - 3):
        written(folder, text[:size], "cut.txt")
        refused(RecordError, ValueError, ["cut.txt"], lambda: restore(folder, record="cut.txt"))
    first = text[text.index("ints: ") :].split("\n", 1)[0]
    refused(RecordError, ValueError, ["bad.txt", "'conv1'", "20"], edited, first, "ints: 20")
    refused(RecordError, ValueError, ["bad.txt", "'conv1'", "-1"], edited, first, "ints: -1")
    refused(RecordError, ValueError, ["bad.txt", "'conv1'", "twice"], edited, first, f"{first} {first}")
    # A whole group is missing.
    second = text.index("prune_record", 20)
    refused(RecordError, ValueError, ["bad.txt", "not whole"], edited, text[:second], "")


def test_record_of_another_model(saved: tuple[Path, nn.Module]) -> None:
    folder, pruned = saved
    other = nn.Sequential(nn.Conv2d(3, 20, 3), nn.Conv2d(20, 4, 3))
    refused(RecordError, ValueError, ["'conv1.weight'", "not in Sequential"], lambda: restore(folder, other))

    class Wider(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 30, 3), nn.BatchNorm2d(30), nn.Conv2d(30, 24, 3)

    words = ["'conv1.weight'", "[30, 3, 3, 3]", "20", "another model"]
    refused(RecordError, ValueError, words, lambda: restore(folder, Wider()))
    # The model of the record, but already pruned.
    refused(RecordError, ValueError, ["'conv1.weight'", "already pruned"], lambda: restore(folder, pruned))


class Mine:
    """Unpickling an object of this class would leave a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_pickled_code_is_not_executed(saved: tuple[Path, nn.Module]) -> None:
    folder, pruned = saved
    trap = folder / "executed"
    torch.save({"state": Mine(str(trap)), **pruned.state_dict()}, folder / "code.pth")
    (folder / "plain.pth").write_bytes(pickle.dumps(Mine(str(trap))))
    torch.save(pruned, folder / "whole.pth")  # a whole model is code, too
    for name in ("code.pth", "plain.pth", "whole.pth"):
        words = [name, "not executed", "state_dict()"]
        refused(WeightsError, ValueError, words, lambda name=name: restore(folder, weights=name))
    assert not trap.exists()


def test_weights_file(saved: tuple[Path, nn.Module]) -> None:
    folder, pruned = saved
    state = pruned.state_dict()

    def with_weights(content: Any, name: str | None = None) -> None:
        torch.save(content, folder / "bad.pth")
        restore(folder, weights="bad.pth", name=name)

    refused(
        FileError, OSError, ["weights file", "absent.pth does not exist"], lambda: restore(folder, weights="absent.pth")
    )
    refused(FileError, OSError, ["weights file", "is a folder"], lambda: restore(folder, weights="."))
    (folder / "text.pth").write_text("hello")
    refused(WeightsError, ValueError, ["text.pth"], lambda: restore(folder, weights="text.pth"))
    (folder / "cut.pth").write_bytes((folder / "w.pth").read_bytes()[:-2000])
    refused(WeightsError, ValueError, ["cut.pth", "no checkpoint"], lambda: restore(folder, weights="cut.pth"))
    words = ["'conv1.weight' has shape [20, 3, 3, 3]", "needs [10, 3, 3, 3]"]
    refused(WeightsError, ValueError, words, with_weights, SmallNet().state_dict())
    refused(WeightsError, ValueError, ["misses 'conv2.weight'"], with_weights,
            {key: value for key, value in state.items() if key != "conv2.weight"})  # fmt: skip
    words = ["has 'covn9.weight'", "does not know", "'conv1.weight'"]
    refused(WeightsError, ValueError, words, with_weights, {**state, "covn9.weight": torch.zeros(1)})
    words = ["no key 'state_dcit' (state_dict_name)", "did you mean 'state_dict'"]
    refused(WeightsError, ValueError, words, with_weights, {"state_dict": state, "epoch": 1}, "state_dcit")
    words = ["no key 'model'", "it is a state dict itself, leave state_dict_name out"]
    refused(WeightsError, ValueError, words, with_weights, dict(state), "model")
    words = ["'state_dict' is a", "give state_dict_name", "'state_dict'"]
    refused(WeightsError, ValueError, words, with_weights, {"state_dict": dict(state)})
    refused(WeightsError, ValueError, ["holds a list", "a state dict is needed"], with_weights, [1, 2])
    refused(WeightsError, ValueError, ["no key 'x'"], with_weights, [1, 2], "x")


def test_restore_checks_the_config(saved: tuple[Path, nn.Module]) -> None:
    folder, _ = saved
    written(folder, "prune_config { }", "bad.cfg")
    refused(ConfigError, ValueError, ["bad.cfg", "prune_config"], lambda: restore(folder, config="bad.cfg"))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(5, 5)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.block = nn.Sequential(nn.ReLU(), Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.conv(x))


def test_forward_that_fails_says_where(tmp_path: Path) -> None:
    run = lambda net, inputs: create(net, inputs, tmp_path, channels_config(0.5))  # noqa: E731
    refused(ModelError, RuntimeError, ["forward of block.1 (Inner) fails"], run, Failing(), IMAGE)
    refused(ModelError, RuntimeError, ["forward of conv1 (Conv2d) fails", "channels"], run, SmallNet(),
            torch.randn(1, 4, 16, 16))  # fmt: skip
    refused(ModelError, RuntimeError, ["SmallNet", "fails", "TypeError"], run, SmallNet(), (IMAGE, IMAGE))
    assert not (tmp_path / "record.txt").exists()


@pytest.mark.parametrize("result", [None, 3.5, "text", {"a": 1}, []])
def test_forward_without_a_tensor(result: Any, tmp_path: Path) -> None:
    class Silent(SmallNet):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return result

    words = ["forward of Silent returns no tensor", type(result).__name__]
    refused(ModelError, RuntimeError, words, create, Silent(), IMAGE, tmp_path, channels_config(0.5))


def test_models_that_cannot_be_changed(tmp_path: Path) -> None:
    traced = torch.jit.trace(SmallNet().eval(), IMAGE)
    scripted = torch.jit.script(nn.Linear(4, 4))
    text = channels_config(0.5)
    refused(UnsupportedModelError, TypeError, ["TorchScript", "Python module"], create, traced, IMAGE, tmp_path, text)
    words = ["model.0 is a", "TorchScript"]
    refused(UnsupportedModelError, TypeError, words, create, nn.Sequential(scripted), IMAGE, tmp_path, text)
    for model, kind in (
        (SmallNet, "the class SmallNet"),
        (SmallNet().state_dict(), "a OrderedDict"),
        (None, "a NoneType"),
    ):
        words = [f"model is {kind}", "torch.nn.Module is needed"]
        refused(UnsupportedModelError, TypeError, words, create, model, IMAGE, tmp_path, text)
    words = ["model is a NoneType"]
    refused(UnsupportedModelError, TypeError, words, save_prune_retrain_model, None, str(tmp_path / "m"), IMAGE)
    config = written(tmp_path, text)
    refused(
        UnsupportedModelError, TypeError, ["TorchScript"], restore_prune_retrain_model, traced, IMAGE, "r", config, "w"
    )


def test_layers_without_weights_yet(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(nn.LazyConv2d(4, 1)))
    words = ["model.1.0 is a LazyConv2d without weights yet", "run the model once"]
    refused(UnsupportedModelError, TypeError, words, create, lazy, IMAGE, tmp_path, channels_config(0.5))
    lazy(IMAGE)
    assert create(lazy, IMAGE, tmp_path, channels_config(0.5))[0][0].out_channels == 4


def test_values_that_cannot_be_ranked(tmp_path: Path) -> None:
    model = SmallNet()
    with torch.no_grad():
        model.conv2.weight[3, 0, 0, 0] = float("nan")
    words = ["conv2.weight", "1 of 4320", "NaN"]
    refused(WeightsError, ValueError, words, create, model, IMAGE, tmp_path, channels_config(0.5))


def test_input_without_elements(tmp_path: Path) -> None:
    words = ["input_data[1] has shape [0, 3]", "at least 1"]
    refused(ConfigError, ValueError, words, create, SmallNet(), (IMAGE, torch.zeros(0, 3)), tmp_path,
            channels_config(0.5))  # fmt: skip


@pytest.mark.parametrize("inputs", ["image.png", 3, None, {"x": IMAGE}])
def test_input_data_of_another_kind(inputs: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"input_data is a .*; allowed: a tensor or a tuple of tensors"):
        create(SmallNet(), inputs, tmp_path, channels_config(0.5))


@pytest.mark.parametrize(
    ("levels", "words"), [(("loud", "info"), "print_level is 'loud'"), (("info", 3), "save_level is 3")]
)
def test_logging_level(levels: tuple[Any, Any], words: str) -> None:
    refused(ConfigError, ValueError, [words, "'debug'", "'error'"], set_logging_level, *levels)


def test_interrupted_write_leaves_the_old_record(
    saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    before = (folder / "record.txt").read_bytes()
    names = sorted(path.name for path in folder.iterdir())

    def stop(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        create(SmallNet(), IMAGE, folder, channels_config(0.25))
    assert (folder / "record.txt").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == names


def test_checkpoint_that_is_none(tmp_path: Path) -> None:
    text, empty, cut = tmp_path / "text.pth", tmp_path / "empty.pth", tmp_path / "cut.pth"
    text.write_bytes(b"hello world, this is junk " * 10)
    empty.write_bytes(b"")
    torch.save(SmallNet().state_dict(), cut)
    cut.write_bytes(cut.read_bytes()[:-300])
    for path in (text, empty, cut):
        with pytest.raises(WeightsError) as caught:
            read_checkpoint(path)
        message = str(caught.value)
        assert str(path) in message
        assert "pickled code" not in message
        assert "\n" not in message


def test_record_edited_by_hand(saved: tuple[Path, nn.Module]) -> None:
    folder, model = saved
    record = folder / "record.txt"
    whole = record.read_text()
    edited = re.sub(r'(name: "end"\s+type: INT\s+i: )\d+', r"\g<1>9999", whole, count=1)
    assert edited != whole
    record.write_text(edited)
    with pytest.raises(RecordError, match="not edited by hand"):
        restore_prune_retrain_model(model, IMAGE, record, folder / "prune.cfg", folder / "w.pth")


def test_quantisation_asked_of_pruning_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = channels_config(0.5) + "\nretrain_data_quant_config { ulq_quantize {} }\n"
    create(SmallNet(), IMAGE, tmp_path, text)
    assert "asks for quantisation, which create_compressed_retrain_model adds" in caplog.text


@pytest.mark.parametrize("function", [create_prune_retrain_model, create_compressed_retrain_model])
def test_the_config_is_not_taken_for_the_record(function: Any, tmp_path: Path) -> None:
    config = written(tmp_path, channels_config(0.5))
    before = Path(config).read_text()
    with pytest.raises(FileError, match="is the config file itself"):
        function(SmallNet(), IMAGE, config, config)
    assert Path(config).read_text() == before
