"""Products in pieces against plain torch operators in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from openwork.config import GradMode, NofMSetting
from openwork.torch.sparse24 import apply_24, functions, masks_of, products

ONCE = NofMSetting()
ALWAYS = NofMSetting(update_freq=1)
SR_STE = NofMSetting(update_freq=1, grad_mode=GradMode.SR_STE, sr_ste_decay=0.05)

LAYERS = {
    "3x3": (lambda: nn.Conv2d(128, 160, 3, padding=1), (2, 128, 2, 3)),
    "strided, dilated": (lambda: nn.Conv2d(128, 200, (3, 2), (2, 1), (0, 1), (1, 2), bias=False), (2, 128, 5, 3)),
    "1x1": (lambda: nn.Conv2d(512, 300, 1), (3, 512, 2, 2)),
    "1x1 strided": (lambda: nn.Conv2d(512, 300, 1, stride=2), (2, 512, 3, 3)),
    "circular": (lambda: nn.Conv2d(128, 160, 3, padding=1, padding_mode="circular"), (1, 128, 3, 3)),
    "same": (lambda: nn.Conv2d(128, 200, (2, 3), padding="same"), (1, 128, 3, 3)),
    "one image": (lambda: nn.Conv2d(128, 160, 3), (128, 5, 5)),
    "linear": (lambda: nn.Linear(700, 400), (5, 700)),
    "linear of sequences": (lambda: nn.Linear(700, 400, bias=False), (2, 3, 700)),
    "linear of one sample": (lambda: nn.Linear(700, 400), (700,)),
    "rows longer than a piece": (lambda: nn.Linear(140_000, 5), (2, 140_000)),
}


@pytest.fixture
def calls(monkeypatch):
    """Counts the products in pieces that a test takes."""
    seen: list[str] = []

    def counted(inner):
        def call(*arguments):
            seen.append(inner.__name__)
            return inner(*arguments)

        return call

    for inner in (products.product, products.product_gradients):
        monkeypatch.setattr(functions, inner.__name__, counted(inner))
    return seen


def _layer(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    return make(), torch.randn(shape)


def _masked(layer: nn.Module, setting: NofMSetting) -> nn.Module:
    return apply_24(nn.Sequential(layer), {"0": setting})


def _reference(layer: nn.Module, mask: torch.Tensor, x: torch.Tensor, decay: float | None):
    """Output and gradients of weight, bias and input, by torch's own operators in double precision."""
    plain = type(layer).__new__(type(layer))
    plain.__dict__ = {**layer.__dict__, "_parameters": {}}
    effective = (layer.weight.detach().double() * mask).requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    plain._parameters.update(weight=effective, bias=bias)
    x = x.double().requires_grad_()
    output = plain(x)
    (output * _slope(output)).sum().backward()
    gradient = effective.grad * mask if decay is None else effective.grad + decay * layer.weight.detach() * ~mask
    return output, gradient, None if bias is None else bias.grad, x.grad


def _slope(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("setting", [ONCE, ALWAYS, SR_STE], ids=["once", "always", "sr_ste"])
def test_large_weights_of_few_rows(name, setting, calls):
    layer, x = _layer(name)
    model = _masked(layer, setting)
    mask = torch.from_numpy(masks_of(model)["0"])
    expected = _reference(layer, mask, x, 0.05 if setting is SR_STE else None)
    own = x.clone().requires_grad_()
    output = model(own)
    (output * _slope(output)).sum().backward()
    in_pieces = not (setting is ONCE and name in ("circular", "same", "one image"))
    assert calls == (["product", "product_gradients"] if in_pieces else [])
    found = output, model[0].weight.grad, None if layer.bias is None else model[0].bias.grad, own.grad
    for one, other in zip(found, expected):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)
    if setting is not SR_STE:
        assert not found[1][~mask].any()


@pytest.mark.parametrize("setting", [ONCE, ALWAYS], ids=["once", "always"])
def test_what_needs_no_gradient_gets_none(setting, calls):
    layer, x = _layer("3x3")
    model = _masked(layer, setting)
    mask = torch.from_numpy(masks_of(model)["0"])
    _, to_weight, to_bias, to_input = _reference(layer, mask, x, None)
    for needed in ("input", "weight", "bias"):
        model.zero_grad()
        model[0].weight.requires_grad_(needed == "weight")
        model[0].bias.requires_grad_(needed == "bias")
        own = x.clone().requires_grad_(needed == "input")
        output = model(own)
        (output * _slope(output)).sum().backward()
        found = {"input": own.grad, "weight": model[0].weight.grad, "bias": model[0].bias.grad}
        for kind, expected in (("input", to_input), ("weight", to_weight), ("bias", to_bias)):
            if kind == needed:
                torch.testing.assert_close(found[kind], expected.float(), rtol=1e-4, atol=1e-4)
            else:
                assert found[kind] is None
    assert len(calls) == 6


@pytest.mark.parametrize("setting", [ONCE, ALWAYS], ids=["once", "always"])
def test_outputs_lie_in_memory_as_inputs_do(setting, calls):
    layer, x = _layer("3x3")
    model = _masked(layer, setting)
    for order in (torch.contiguous_format, torch.channels_last):
        assert model(x.contiguous(memory_format=order)).is_contiguous(memory_format=order)
    assert len(calls) == 2


@pytest.mark.parametrize("setting", [ONCE, ALWAYS], ids=["once", "always"])
def test_where_pieces_do_not_serve_the_result_is_the_same(setting, calls):
    layer, x = _layer("3x3")
    model = _masked(layer, setting)
    expected = model(x)
    calls.clear()
    many = torch.cat([x] * 4)
    torch.testing.assert_close(model(many)[:2], expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    grouped = _masked(nn.Conv2d(256, 512, 3, groups=4), setting)
    grouped(torch.randn(1, 256, 3, 3))
    half = _masked(layer.bfloat16(), setting)
    assert half(x.bfloat16()).dtype is torch.bfloat16
    assert not calls


def test_forward_mode_still_works_under_a_fixed_mask(calls):
    layer, x = _layer("linear")
    model = _masked(layer, ONCE)
    output = model(x)
    assert calls == ["product"]
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        value, change = torch.autograd.forward_ad.unpack_dual(dual)
        torch.testing.assert_close(value, output, rtol=1e-4, atol=1e-4)
        expected = functional.linear(torch.ones_like(x), model[0].weight)
        torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-4)
    assert calls == ["product"]


def test_second_derivatives(calls):
    layer, x = _layer("3x3")
    model = _masked(layer, ALWAYS).double()
    own = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(model(own).pow(3).sum(), own, create_graph=True)
    assert calls == ["product"]
    slope.square().sum().backward()
    mask = torch.from_numpy(masks_of(model)["0"])
    weight = layer.weight.detach().double().requires_grad_()
    other = x.double().requires_grad_()
    output = functional.conv2d(other, weight * mask, layer.bias.double(), padding=1)
    (slope,) = torch.autograd.grad(output.pow(3).sum(), other, create_graph=True)
    slope.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, weight.grad)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((1, 1), (1, 1), (0, 0), (1, 1)), ((1, 1), (2, 1), (0, 1), (1, 1)), ((3, 2), (2, 1), (1, 0), (1, 2))],
)
def test_gather_is_what_a_convolution_reads_and_scatter_its_transpose(kernel, stride, padding, dilation):
    x = torch.randn(2, 3, 6, 5, dtype=torch.double, requires_grad=True)
    weight = torch.randn(4, 3, *kernel, dtype=torch.double)
    settings = (list(stride), list(padding), list(dilation), False, [0, 0], 1)
    rows = products.gather(x.detach(), kernel, settings)
    size = products.output_size(x, kernel, settings)
    output = functional.conv2d(x, weight, None, stride, padding, dilation)
    torch.testing.assert_close((rows @ weight.flatten(1).t()).view(2, *size, 4).permute(0, 3, 1, 2), output)
    slopes = torch.randn_like(output)
    output.backward(slopes)
    flat = slopes.permute(0, 2, 3, 1).reshape(-1, 4)
    torch.testing.assert_close(products.scatter(flat @ weight.flatten(1), x.shape, kernel, settings), x.grad)
