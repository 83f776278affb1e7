"""What can be masked, what is refused and why, and given masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from openwork.config import NofMSetting, QuantSetting
from openwork.errors import ConfigError, ModelError, RecordError, UnsupportedModelError
from openwork.torch.quant import apply_quant
from openwork.torch.sparse24 import apply_24, finalize, load_masks, maskable_layers, masks_of

ONCE = NofMSetting()


class OwnPadding(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.pad(x, (1, 0, 1, 0))
        return functional.conv2d(x, self.weight, self.bias)


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_reasons():
    shared = nn.Linear(8, 8)
    other = nn.Linear(8, 8)
    other.weight = shared.weight
    model = nn.ModuleDict(
        {
            "fine": nn.Conv2d(8, 8, 3),
            "two": nn.Conv2d(2, 8, 3),
            "three": nn.Conv2d(3, 8, 3),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "shared": shared,
            "other": other,
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "pruned": prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
            "lazy": nn.LazyLinear(4),
            "own": OwnPadding(8, 8, 3),
            "standard": Standardised(8, 8, 3),
            "norm": nn.BatchNorm2d(8),
            "up": nn.ConvTranspose2d(8, 8, 2, groups=2),
            "up_depthwise": nn.ConvTranspose2d(8, 8, 2, groups=8),
        }
    )
    reasons = maskable_layers(model)
    assert [name for name, why in reasons.items() if not why] == ["fine", "three", "own", "up"]
    assert "2 input channels" in reasons["two"]
    assert "1 input channels" in reasons["depthwise"]
    assert "shared by 2" in reasons["shared"]
    assert "shared by 2" in reasons["other"]
    assert "parametrized" in reasons["parametrized"]
    assert "wrapper" in reasons["pruned"]
    assert "lazy" in reasons["lazy"]
    assert "Standardised" in reasons["standard"]
    assert "norm" not in reasons


def test_a_layer_with_its_own_forward_is_masked():
    torch.manual_seed(0)
    model = nn.Sequential(OwnPadding(8, 8, 3))
    for setting in (ONCE, NofMSetting(update_freq=1)):
        masked = apply_24(model, {"0": setting})
        x = torch.randn(2, 8, 5, 5)
        masked(x).sum().backward()
        mask = torch.from_numpy(masks_of(masked)["0"])
        expected = functional.conv2d(functional.pad(x, (1, 0, 1, 0)), model[0].weight * mask, model[0].bias)
        torch.testing.assert_close(masked(x), expected)
        assert not masked[0].weight.grad[~mask].any()
        assert isinstance(masked[0].weight, nn.Parameter)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"1": ONCE}, "'1' cannot be masked: ReLU"),
        ({"O": ONCE}, "no layer 'O'"),
        ({"2": NofMSetting(n=6, m=8)}, "6 input channels"),
    ],
)
def test_wrong_layers_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        apply_24(_model(), settings)


def test_models_that_cannot_be_masked():
    with pytest.raises(UnsupportedModelError, match="ScriptModule"):
        apply_24(torch.jit.script(_model()), {"0": ONCE})
    with pytest.raises(UnsupportedModelError, match="already"):
        apply_24(apply_24(_model(), {"0": ONCE}), {"2": ONCE})
    with pytest.raises(UnsupportedModelError, match="dict"):
        apply_24({}, {"0": ONCE})
    quantised = torch.ao.quantization.quantize_dynamic(_model(), {nn.Linear})
    with pytest.raises(UnsupportedModelError, match="quantised"):
        apply_24(quantised, {"0": ONCE})
    broken = _model()
    with torch.no_grad():
        broken[2].weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"'2'.*NaN"):
        apply_24(broken, {"2": ONCE})


def test_given_masks_must_fit():
    masked = apply_24(_model(), {"0": ONCE, "2": ONCE})
    good = masks_of(masked)
    for bad, words in (
        ({"0": good["0"]}, "no mask of the layer '2'"),
        ({**good, "3": good["2"]}, "'3'"),
        ({**good, "2": good["2"].T}, "shape"),
        ({**good, "2": good["2"] * 2}, "other than 0 and 1"),
        ({**good, "2": np.ones_like(good["2"])}, r"more than 2 of 4 at \[0, 0\]"),
    ):
        with pytest.raises(RecordError, match=words):
            load_masks(masked, bad)
    assert not any((masks_of(masked)[name] != good[name]).any() for name in good)


def test_loading_dense_weights_after_the_mask_keeps_the_pattern():
    masked = apply_24(_model(), {"0": ONCE})
    load_masks(masked, masks_of(masked))
    masked.load_state_dict(_model().state_dict())
    masked(torch.ones(1, 8))
    sparse = finalize(masked)
    assert (np.count_nonzero(sparse[0].weight.detach().numpy().reshape(6, 2, 4), axis=-1) == 2).all()
    torch.testing.assert_close(masked[0].weight, sparse[0].weight)


def test_loading_other_weights_chooses_the_mask_anew():
    torch.manual_seed(1)
    masked, other = apply_24(_model(), {"0": ONCE}), _model()
    masked(torch.ones(1, 8))
    own = masked.state_dict()
    masked.load_state_dict(own)
    assert (masks_of(masked)["0"] == (own["0.weight"] != 0).numpy()).all()  # its own zeros tell the mask
    with torch.no_grad():
        other[0].weight.copy_(torch.randn(other[0].weight.shape))
    wanted = masks_of(apply_24(other, {"0": ONCE}))["0"]
    assert (masks_of(masked)["0"] != wanted).any()
    masked.load_state_dict(other.state_dict())
    assert (masks_of(masked)["0"] == wanted).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "settings is a NoneType"),
        (["0"], "settings is a list"),
        ({"0": 1}, r"settings\['0'\] is a int; a NofMSetting"),
        ({0: ONCE}, "settings: 0 is a int; the name of a layer"),
    ],
)
def test_settings_of_another_kind_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        apply_24(_model(), settings)
    with pytest.raises(ConfigError, match=words.replace("NofMSetting", "QuantSetting")):
        apply_quant(_model(), settings if settings != {0: ONCE} else {0: QuantSetting()})


def test_masks_of_another_kind_are_named():
    masked = apply_24(_model(), {"0": ONCE})
    weight = masked[0].weight
    with pytest.raises(RecordError, match="masks is a list"):
        load_masks(masked, [1])
    with pytest.raises(RecordError, match="mask of '0' is no array of one shape"):
        load_masks(masked, {"0": [[1], [1, 0]]})
    load_masks(masked, {"0": nn.Parameter(torch.from_numpy(masks_of(masked)["0"]).to(weight.dtype))})
    for call in (lambda: finalize("a"), lambda: load_masks("a", {})):
        with pytest.raises(UnsupportedModelError, match="model is a str"):
            call()


def test_other_patterns():
    masked = apply_24(_model(), {"0": NofMSetting(n=1, m=8), "2": NofMSetting(n=3, m=6)})
    sparse = finalize(masked)
    assert (np.count_nonzero(sparse[0].weight.detach().numpy(), axis=1) == 1).all()
    assert (np.count_nonzero(sparse[2].weight.detach().numpy(), axis=1) == 3).all()
