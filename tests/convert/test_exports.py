"""Models as openwork and torch export them: 2:4, 2:4 with INT8, convolutions and attention."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from torch import nn

from convert_masking import mask_to_24
from convert_models import all_ops, convert_and_check

torch = pytest.importorskip("torch")
amct = pytest.importorskip("openwork.torch")


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.grouped, self.norm2 = nn.Conv2d(32, 64, 3, padding=1, groups=2), nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, groups=64)
        self.up, self.head = nn.ConvTranspose2d(64, 16, 2, 2), nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.first(x)))
        x = self.depthwise(torch.relu(self.norm2(self.grouped(x))))
        return self.head(torch.relu(self.up(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        mixed = self.block.self_attn(x, x, x, need_weights=True)[0]
        return self.head(x + self.block.linear2(torch.relu(self.block.linear1(mixed))))


def export(network, example, path, dynamo):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            torch.onnx.export(network.eval(), (example,), dynamo=True, verbose=False).save(str(path))
        else:
            torch.onnx.export(network.eval(), (example,), str(path), dynamo=False, opset_version=13)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("network", [ConvNet, Attention])
def test_torch_exports_masked(tmp_path, network, dynamo):
    torch.manual_seed(0)
    example = torch.randn(2, 8, 10, 10) if network is ConvNet else torch.randint(0, 50, (2, 7))
    path = tmp_path / "export.onnx"
    export(network(), example, path, dynamo)
    model = mask_to_24(path)
    name = model.graph.input[0].name
    report, converted = convert_and_check(model, tmp_path, {name: example.numpy()})
    qualifying = sorted(layer.compressed_operator for layer in report.layers if layer.qualifies)
    reasons = [layer.reason for layer in report.layers if not layer.qualifies]
    if network is ConvNet:
        assert qualifying == ["Conv2DCompress", "Conv2DCompress", "Conv2DTransposeDCompress", "FullyConnectionCompress"]
        assert [reason.split(":")[0] for reason in reasons] == ["depthwise"]
    else:
        # Two projections of attention, two of the block, and the head, whose tied weight the exporter has copied
        # and transposed; scores and mixing have no weight.
        assert len(qualifying) == 5
        assert [reason.split(":")[0] for reason in reasons] == ["dynamic weight", "dynamic weight"]
    assert "Gather" in all_ops(converted) or network is ConvNet


CONFIG = """
retrain_data_quant_config { ulq_quantize { } }
retrain_weight_quant_config { arq_retrain { channel_wise: true } }
prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 } } }
"""


@pytest.mark.parametrize("quantised", [False, True])
def test_openworks_own_exports(tmp_path, quantised):
    torch.manual_seed(0)
    config, record = tmp_path / "config.cfg", tmp_path / "record.txt"
    config.write_text(CONFIG if quantised else CONFIG.split("}\n", 2)[2])
    x = torch.randn(4, 8, 10, 10)
    create = amct.create_compressed_retrain_model if quantised else amct.create_prune_retrain_model
    model = create(ConvNet(), (x,), str(config), str(record))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    if quantised:
        amct.save_compressed_retrain_model(model, str(record), str(tmp_path / "saved"), (x,))
    else:
        amct.save_prune_retrain_model(model, str(tmp_path / "saved"), (x,))
    for kind in ("deploy", "fake_quant"):
        saved = onnx.load(tmp_path / f"saved_{kind}_model.onnx")
        feed = {saved.graph.input[0].name: np.random.default_rng(1).standard_normal((4, 8, 10, 10), np.float32)}
        report, _ = convert_and_check(saved, tmp_path, feed, name=kind)
        assert sum(layer.qualifies for layer in report.layers) == 4, [layer.reason for layer in report.layers]
        if quantised and kind == "deploy":
            assert {layer.type for layer in report.layers if layer.qualifies} == {"int8"}
            assert report.layers[0].bytes_after / report.layers[0].bytes_before == 0.625
