"""One-shot sparsity of torch layers: the right features meet the right weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from openwork.errors import ConfigError, ModelError, UnsupportedModelError
from openwork.torch.sparse24 import one_shot, verify_sparsity
from openwork.torch.sparse24.oneshot import _features, _from_matrices, _matrices

LAYERS = [
    nn.Linear(10, 6),
    nn.Conv2d(8, 6, 3, stride=2, padding=1, padding_mode="circular"),
    nn.Conv2d(10, 4, (2, 3), padding="same", groups=2, dilation=(1, 2)),
    nn.Conv2d(8, 6, 1),
]


def _input(layer: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    if isinstance(layer, nn.Linear):
        return torch.randn(5, 3, layer.in_features)
    return torch.randn(2, layer.in_channels, 6, 7)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_features_times_matrices_are_the_layers_output(layer):
    x = _input(layer)
    parts = [
        features @ matrix.t() for features, matrix in zip(_features(layer, x, 4), _matrices(layer, layer.weight, 4))
    ]
    product = torch.cat(parts, dim=1) + layer.bias
    output = layer(x)
    expected = output if isinstance(layer, nn.Linear) else output.permute(0, 2, 3, 1)
    torch.testing.assert_close(product, expected.reshape(product.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [*LAYERS, nn.ConvTranspose2d(12, 6, 3, groups=2)], ids=str)
def test_matrices_turn_back_into_the_weight(layer):
    matrices = _matrices(layer, layer.weight, 4)
    assert all(matrix.shape[1] % 4 == 0 for matrix in matrices)
    assert torch.equal(_from_matrices(layer, matrices, layer.weight.shape, 4), layer.weight)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ConvTranspose2d(16, 8, 2),
        nn.Flatten(),
        nn.Linear(200, 5),
    )


def _batches() -> list[torch.Tensor]:
    # Channels and places of very unequal size.
    scale = torch.exp(2 * torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(2)))
    return [scale * torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def test_every_method_gives_the_pattern_and_data_help():
    net = _net().eval()
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        sparse = one_shot(net, _batches(), method)
        # Three input channels: a group of three that keeps two.
        assert verify_sparsity(sparse).held == ("0", "2", "3", "5")
        assert type(sparse[2]) is nn.Conv2d
        with torch.no_grad():
            errors[method] = sum(float((sparse(x) - net(x)).square().mean()) for x in _batches())
    assert errors["sparsegpt"] < errors["wanda"]
    assert errors["sparsegpt"] < errors["magnitude"]


def test_a_single_layer_gets_the_norms_of_its_own_input():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 6))
    x = torch.randn(50, 12) * torch.exp(torch.randn(12))
    sparse = one_shot(net, [x[:20], x[20:]], "wanda")
    scores = (net[0].weight.abs() * x.norm(dim=0)).detach().numpy().reshape(6, 3, 4)
    kept = sparse[0].weight.detach().numpy().reshape(6, 3, 4) != 0
    for row, group in np.ndindex(6, 3):
        assert set(np.flatnonzero(kept[row, group])) == set(np.argsort(scores[row, group])[2:])
    assert torch.equal(sparse[0].weight[sparse[0].weight != 0], net[0].weight[sparse[0].weight != 0])


def test_bad_requests():
    with pytest.raises(ConfigError, match="sparsegtp"):
        one_shot(_net(), method="sparsegtp")
    with pytest.raises(ModelError, match="at least one batch"):
        one_shot(_net(), method="wanda")
    with pytest.raises(ConfigError, match="'1' cannot be masked"):
        one_shot(_net(), layers=["1"])


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_one_tensor_is_one_batch_and_must_be_finite(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    x = torch.randn(6, 4, 4, 4)
    alone, listed = one_shot(net, x, method), one_shot(net, [x], method)
    for key, value in listed.state_dict().items():
        assert torch.equal(alone.state_dict()[key], value)
    x[2, 1, 0, 0] = float("nan")
    with pytest.raises(ModelError, match="calibration batch 1 has NaN or infinity"):
        one_shot(net, [torch.ones(1, 4, 4, 4), x], method)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_layers_called_by_keyword(method):
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(16, 8)

        def forward(self, x):
            return self.f(input=x)

    torch.manual_seed(0)
    net, x = Keyword(), torch.randn(6, 16)
    plain = nn.Sequential(net.f)
    assert torch.equal(one_shot(net, [x], method).f.weight, one_shot(plain, [x], method)[0].weight)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_inner_values_must_be_finite(method):
    class Exploding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.b(torch.exp(1e3 * self.a(x)))

    torch.manual_seed(0)
    with pytest.raises(ModelError, match="layer 'b': its inputs have NaN or infinity"):
        one_shot(Exploding(), [torch.randn(6, 16)], method)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"damping": 0}, ConfigError, "damping is 0"),
        ({"damping": float("nan")}, ConfigError, "damping is nan"),
        ({"method": None}, ConfigError, "method is None"),
        ({"m": 3.5}, ConfigError, "n_out_of_m is 2:3.5"),
        ({"batches": None}, ConfigError, "batches is a NoneType"),
        ({"batches": [(torch.ones(2, 16), torch.ones(2))]}, ModelError, "fails on calibration batch 0, of 2 arguments"),
        (
            {"batches": [torch.ones(2, 16), torch.ones(2, 3)]},
            ModelError,
            "calibration batch 1, of 1 arguments",
        ),
        ({"model": "net"}, UnsupportedModelError, "model is a str"),
    ],
)
def test_bad_arguments(arguments, error, words):
    given = {"model": nn.Sequential(nn.Linear(16, 8)), "batches": [torch.ones(2, 16)], "method": "sparsegpt"}
    with pytest.raises(error, match=words):
        one_shot(**{**given, **arguments})
