"""create, restore and save with 2:4 masks, alone and with quantisation."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

import openwork.torch as amct
from bad_arguments import refuse_to_write
from openwork.errors import ConfigError, FileError, ModelError, RecordError, UnsupportedModelError, WeightsError
from openwork.record import Record, SelectiveMaskRecord, load_record, save_record
from openwork.sparsity import nm_mask
from openwork.torch.sparse24 import masks_of

MASKS = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: %d } } }\n"
QUANT = (
    "retrain_data_quant_config { ulq_quantize { } }\n"
    "retrain_weight_quant_config { arq_retrain { channel_wise: true } }\n"
)
CHANNELS = (
    'override_layer_configs { layer_name: "0" prune_config { filter_pruner { balanced_l2_norm_filter_prune '
    "{ prune_ratio: 0.5 ascend_optimized: false } } } }\n"
)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def _train(model: nn.Module, steps: int = 4, lr: float = 0.2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(_x(step)), torch.arange(4)).backward()
        optimizer.step()


def _config(tmp_path, text: str):
    (tmp_path / "config.cfg").write_text(text)
    return tmp_path / "config.cfg"


def _weights(path) -> list[np.ndarray]:
    model = onnx.load(path)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return [tensors[node.input[1]] for node in model.graph.node if node.op_type in ("Conv", "Gemm")]


def _most(weight: np.ndarray) -> int:
    moved = np.moveaxis(weight, 1, -1)
    return int(np.count_nonzero(moved.reshape(*moved.shape[:-1], -1, 4), axis=-1).max())


@pytest.mark.parametrize("frequency", [0, 1])
def test_masks_beside_channel_pruning(frequency, tmp_path):
    config, record = _config(tmp_path, MASKS % frequency + CHANNELS), tmp_path / "record.txt"
    net = _net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    model = amct.create_prune_retrain_model(net, _x(), config, record)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert model.training
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == list(before)
    assert model[0].weight.shape[0] == 8
    assert set(load_record(record).masks) == {"3", "7"}
    _train(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    saved = load_record(record).masks
    for name, mask in masks_of(model).items():
        np.testing.assert_array_equal(saved[name].mask(), mask)
    restored = amct.restore_prune_retrain_model(_net(), _x(), record, config, tmp_path / "weights.pth")
    with torch.no_grad():
        torch.testing.assert_close(restored.eval()(_x()), model.eval()(_x()), rtol=0, atol=0)
    amct.save_prune_retrain_model(restored, tmp_path / "out" / "net", _x(), opset=17)
    files = [tmp_path / "out" / f"net_{kind}_model.onnx" for kind in ("deploy", "fake_quant")]
    for path in files:
        _, conv, linear = _weights(path)
        assert _most(conv) == _most(linear) == 2
        session = onnxruntime.InferenceSession(path)
        result = session.run(None, {session.get_inputs()[0].name: _x().numpy()})[0]
        np.testing.assert_allclose(result, model(_x()).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_record_is_written_with_the_checkpoint_not_at_each_step(tmp_path):
    config, record = _config(tmp_path, MASKS % 1), tmp_path / "record.txt"
    model = amct.create_prune_retrain_model(_net(), _x(), config, record)
    first = record.read_bytes()
    _train(model, 6, lr=1.0)
    assert record.read_bytes() == first
    model.state_dict()
    assert record.read_bytes() != first


def test_a_model_that_never_ran_is_saved_with_zeros(tmp_path):
    model = amct.create_prune_retrain_model(_net(), _x(), _config(tmp_path, MASKS % 0), tmp_path / "record.txt")
    amct.save_prune_retrain_model(model, f"{tmp_path}/", _x(), opset=17)
    _, conv, linear = _weights(tmp_path / "deploy_model.onnx")
    assert _most(conv) == _most(linear) == 2
    assert np.isfinite(conv).all()


def test_records_and_checkpoints_of_amct(tmp_path):
    # AMCT wraps masked layers and keeps dense weights in the checkpoint.
    net = _net()
    config = _config(tmp_path, MASKS % 0)
    rng = np.random.default_rng(0)
    masks = {}
    for name, shape in (("3", (32, 16, 3, 3)), ("7", (10, 512))):
        choice = np.argsort(rng.random((shape[0], shape[1] // 4, 4, *shape[2:])), axis=2) < 2
        masks[name] = choice.reshape(shape)
    save_record(
        Record(masks={name: SelectiveMaskRecord.of(name, mask) for name, mask in masks.items()}), tmp_path / "r.txt"
    )
    state = {
        key.replace("3.", "3.replaced_module.").replace("7.", "7.replaced_module."): value
        for key, value in net.state_dict().items()
    }
    state["3.prune_mask_helper"] = torch.zeros(3)
    torch.save(state, tmp_path / "amct.pth")
    restored = amct.restore_prune_retrain_model(_net(), _x(), tmp_path / "r.txt", config, tmp_path / "amct.pth").eval()
    weights = {f"{name}.weight": net[int(name)].weight * torch.from_numpy(mask) for name, mask in masks.items()}
    expected = torch.func.functional_call(net.eval(), weights, (_x(),))
    torch.testing.assert_close(restored(_x()), expected)


def test_a_record_that_contradicts_the_zeros_of_the_checkpoint_gives_way(tmp_path):
    config, record = _config(tmp_path, MASKS % 0), tmp_path / "record.txt"
    model = amct.create_prune_retrain_model(_net(), _x(), config, record)
    _train(model)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    other = {name: np.flip(mask, 1).copy() for name, mask in masks_of(model).items()}
    save_record(Record(masks={n: SelectiveMaskRecord.of(n, m) for n, m in other.items()}), record)
    restored = amct.restore_prune_retrain_model(_net(), _x(), record, config, tmp_path / "weights.pth")
    torch.testing.assert_close(restored.eval()(_x()), model.eval()(_x()))


def test_records_of_other_models_are_refused(tmp_path):
    config, record = _config(tmp_path, MASKS % 0), tmp_path / "record.txt"
    torch.save(_net().state_dict(), tmp_path / "weights.pth")
    for mask, words in (
        (SelectiveMaskRecord.of("nine", np.ones((4, 4))), "nine"),
        (SelectiveMaskRecord.of("1", np.ones(16)), "BatchNorm2d"),
        (SelectiveMaskRecord.of("7", np.ones((10, 8))), "not 2:4|shape"),
        (SelectiveMaskRecord.of("7", np.ones((10, 512))), "not 2:4"),
        (SelectiveMaskRecord.of("7", np.zeros((10, 256))), "shape"),
    ):
        save_record(Record(masks={mask.name: mask}), record)
        with pytest.raises(RecordError, match=words):
            amct.restore_prune_retrain_model(_net(), _x(), record, config, tmp_path / "weights.pth")


@pytest.mark.parametrize("prune", ["", MASKS % 0])
def test_a_record_that_cannot_be_written_is_found_before_the_models_are(prune, tmp_path, monkeypatch):
    """The path of the record is checked first: no ONNX files without the record that belongs to them."""
    config, record = _config(tmp_path, prune + QUANT), tmp_path / "record.txt"
    model = amct.create_compressed_retrain_model(_net(), _x(), config, record)
    _train(model, lr=0.05)
    before = record.read_bytes()
    refuse_to_write(monkeypatch, "record.txt")
    with pytest.raises(FileError, match=r"record_file .*record\.txt cannot be written: No space left"):
        amct.save_compressed_retrain_model(model, record, tmp_path / "out" / "net", _x())
    assert not list(tmp_path.rglob("*.onnx"))
    assert record.read_bytes() == before


@pytest.mark.parametrize("prune", ["", MASKS % 0, MASKS % 2 + CHANNELS])
def test_compressed_models_end_to_end(prune, tmp_path):
    config, record = _config(tmp_path, prune + QUANT), tmp_path / "record.txt"
    model = amct.create_compressed_retrain_model(_net(), _x(), config, record)
    with pytest.raises(ModelError, match="never calibrated"):
        amct.save_compressed_retrain_model(model, record, tmp_path / "early", _x())
    assert not list(tmp_path.glob("early*.onnx"))
    _train(model, lr=0.05)
    torch.save({"net": model.state_dict()}, tmp_path / "weights.pth")
    restored = amct.restore_compressed_retrain_model(
        _net(), _x(), config, record, tmp_path / "weights.pth", state_dict_name="net"
    )
    with torch.no_grad():
        expected = model.eval()(_x())
        torch.testing.assert_close(restored.eval()(_x()), expected, rtol=0, atol=0)
    amct.save_compressed_retrain_model(restored, record, tmp_path / "net", _x(), opset=17)
    written = load_record(record)
    assert set(written.factors) == {"0", "3", "7"}
    assert bool(written.channels) == ("filter_pruner" in prune)
    session = onnxruntime.InferenceSession(tmp_path / "net_fake_quant_model.onnx")
    result = session.run(None, {session.get_inputs()[0].name: _x().numpy()})[0]
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert not any(
        node.op_type == "BatchNormalization" for node in onnx.load(tmp_path / "net_deploy_model.onnx").graph.node
    )


def test_bad_compression_configs(tmp_path):
    record = tmp_path / "record.txt"
    for text, words in (
        ("batch_num: 2\n", "nothing|neither"),
        ("retrain_data_quant_config { ulq_quantize { dst_type: INT4 } }\n", "INT4"),
        ("retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: -1 clip_min: 1 } } }\n", "clip_max"),
        ("prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 1.5 } } }\n", "update_freq"),
    ):
        with pytest.raises(ConfigError, match=words):
            amct.create_compressed_retrain_model(_net(), _x(), _config(tmp_path, text), record)
        assert not record.exists()


def test_checkpoints_of_another_kind_are_named(tmp_path):
    config, record = _config(tmp_path, MASKS % 0 + QUANT), tmp_path / "record.txt"
    amct.create_compressed_retrain_model(_net(), _x(), config, record)
    torch.save(_net().state_dict(), tmp_path / "plain.pth")
    with pytest.raises(WeightsError, match="input_quant"):
        amct.restore_compressed_retrain_model(_net(), _x(), config, record, tmp_path / "plain.pth")


def test_models_that_went_through_create_are_refused(tmp_path):
    config, record = _config(tmp_path, MASKS % 0 + QUANT), tmp_path / "record.txt"
    masked = amct.create_prune_retrain_model(_net(), _x(), config, record)
    both = amct.create_compressed_retrain_model(_net(), _x(), config, record)
    for model in (masked, both):
        with pytest.raises(UnsupportedModelError, match="carries a mask already"):
            amct.create_prune_retrain_model(model, _x(), config, record)
        with pytest.raises(UnsupportedModelError, match="already"):
            amct.create_compressed_retrain_model(model, _x(), config, record)
    with pytest.raises(UnsupportedModelError, match="save_compressed_retrain_model"):
        amct.save_prune_retrain_model(both, tmp_path / "net", _x())


def test_layers_that_cannot_be_masked_are_left_alone_and_told(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    with caplog.at_level("INFO", logger="openwork"):
        masked = amct.create_prune_retrain_model(
            model, torch.randn(2, 8), _config(tmp_path, MASKS % 0), tmp_path / "record.txt"
        )
    assert list(masks_of(masked)) == ["2"]
    assert "0 gets no 2:4 mask: its weight is shared by 2 modules" in caplog.text
    assert "3 gets no 2:4 mask: it has 2 input channels" in caplog.text
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("of 4 layers that the config asks for, 0 gets no mask: its weight is shared by 2 modules")


_SR_STE = (
    "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: 1 grad_mode: SR_STE "
    "sr_ste_decay: 0.1 } } }\n"
)


def _retrained(tmp_path, text):
    config, record = _config(tmp_path, text), tmp_path / "record.txt"
    model = amct.create_prune_retrain_model(_net(), (_x(),), config, record)
    _train(model)
    return model, config, record


@pytest.mark.parametrize("text", [MASKS % 1, MASKS % 3, _SR_STE], ids=["always", "every third", "sr_ste"])
def test_a_record_of_a_later_checkpoint_is_told_from_an_earlier_one(text, tmp_path, caplog):
    model, config, record = _retrained(tmp_path, text)
    torch.save(model.state_dict(), tmp_path / "best.pth")
    best, kept = model.eval()(_x(9)), record.read_text()
    (tmp_path / "best.txt").write_text(kept)
    model.train()
    _train(model, 8, 1.0)
    torch.save(model.state_dict(), tmp_path / "last.pth")
    last = model.eval()(_x(9))
    assert record.read_text() != kept

    def restored(record_file, weights):
        caplog.clear()
        return amct.restore_prune_retrain_model(_net(), (_x(),), record_file, config, tmp_path / weights).eval()

    for record_file, weights, expected in ((tmp_path / "best.txt", "best.pth", best), (record, "last.pth", last)):
        before = record_file.read_bytes()
        twin = restored(record_file, weights)
        assert torch.equal(twin(_x(9)), expected)
        assert "another checkpoint" not in caplog.text
        assert record_file.read_bytes() == before
        twin.state_dict()
        assert record_file.read_bytes() == before
    other = restored(record, "best.pth")
    assert "the record was written beside another checkpoint: the masks of 3 layers" in caplog.text
    plain = _net()
    plain.load_state_dict(torch.load(tmp_path / "best.pth"))
    for name, mask in masks_of(other).items():
        np.testing.assert_array_equal(mask, nm_mask(plain.get_submodule(name).weight.detach().numpy()))


def test_a_checkpoint_of_a_mask_that_never_changes_needs_no_record_of_its_own(tmp_path, caplog):
    model, config, record = _retrained(tmp_path, MASKS % 0)
    torch.save(model.state_dict(), tmp_path / "best.pth")
    best = model.eval()(_x(9))
    _train(model.train(), 8, 1.0)
    model.state_dict()
    twin = amct.restore_prune_retrain_model(_net(), (_x(),), record, config, tmp_path / "best.pth")
    assert torch.equal(twin.eval()(_x(9)), best)
    assert "another checkpoint" not in caplog.text


@pytest.mark.parametrize("frequency", [0, 1, 5])
def test_weights_loaded_into_a_live_model_choose_their_own_masks(frequency, tmp_path):
    model, *_ = _retrained(tmp_path, MASKS % frequency)
    saved = copy.deepcopy(model.state_dict())
    _train(model, 8, 1.0)
    model.load_state_dict(saved)
    model.eval()(_x())
    for name, mask in masks_of(model).items():
        np.testing.assert_array_equal(mask, nm_mask(saved[f"{name}.weight"].numpy()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_are_not_saved(value, tmp_path):
    model, *_ = _retrained(tmp_path, MASKS % 1)
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = value
    with pytest.raises(ModelError, match=r"layer '3': its weight has (NaN|infinity)"):
        amct.save_prune_retrain_model(model, tmp_path / "out" / "m", (_x(),))
    assert not (tmp_path / "out").exists()
    both = amct.create_compressed_retrain_model(
        _net(), (_x(),), _config(tmp_path, MASKS % 1 + QUANT), tmp_path / "q.txt"
    )
    both(_x())
    with torch.no_grad():
        both[3].weight[0, 0, 0, 0] = value
    before = (tmp_path / "q.txt").read_bytes()
    with pytest.raises(ModelError, match=r"layer '3': its weight has (NaN|infinity)"):
        amct.save_compressed_retrain_model(both, tmp_path / "q.txt", tmp_path / "out" / "m", (_x(),))
    assert (tmp_path / "q.txt").read_bytes() == before
    assert not (tmp_path / "out").exists()
    net = _net()
    with torch.no_grad():
        net[7].weight[0, 0] = value
    with pytest.raises(ModelError, match=r"layer '7': its weight has (NaN|infinity)"):
        amct.create_prune_retrain_model(net, (_x(),), _config(tmp_path, MASKS % 1), tmp_path / "r.txt")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_not_quantised(dtype, tmp_path):
    with pytest.raises(ModelError, match=rf"layer '\d': its weight is {dtype}; .* needs torch.float32"):
        amct.create_compressed_retrain_model(
            _net().to(dtype), (_x().to(dtype),), _config(tmp_path, MASKS % 1 + QUANT), tmp_path / "r.txt"
        )
    assert not (tmp_path / "r.txt").exists()
