"""Masked training against the same computation written out with plain torch operators."""

from __future__ import annotations

import copy
import io
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from openwork.config import GradMode, NofMSetting
from openwork.torch.sparse24 import apply_24, finalize, load_masks, maskable_layers, masked_layers, masks_of

ONCE = NofMSetting()
ALWAYS = NofMSetting(update_freq=1)
SR_STE = NofMSetting(update_freq=1, grad_mode=GradMode.SR_STE, sr_ste_decay=0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 12, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 16, (2, 3), padding="same", groups=2, dilation=(1, 2), bias=False)
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.up(self.second(x)))
        return self.head(x.mean((2, 3)))


LAYERS = ("first", "second", "up", "head")


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _masked(setting: NofMSetting, net: nn.Module | None = None) -> nn.Module:
    net = net or _net()
    return apply_24(net, {name: setting for name, why in maskable_layers(net).items() if not why})


def _batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed))


def _numpy_mask(weight: torch.Tensor, axis: int, blocks: int = 1) -> torch.Tensor:
    """2:4 by a stable sort of each group."""
    moved = np.moveaxis(weight.detach().double().numpy(), axis, -1)
    parts = []
    for part in np.split(moved, blocks, axis=-1):
        padding = -part.shape[-1] % 4
        padded = np.pad(np.abs(part), [(0, 0)] * (part.ndim - 1) + [(0, padding)])
        groups = padded.reshape(*part.shape[:-1], -1, 4)
        mask = np.zeros(groups.shape, dtype=bool)
        np.put_along_axis(mask, np.argsort(-groups, axis=-1, kind="stable")[..., :2], True, axis=-1)
        parts.append(mask.reshape(padded.shape)[..., : part.shape[-1]])
    return torch.from_numpy(np.moveaxis(np.concatenate(parts, axis=-1), -1, axis).copy())


def _expected_masks(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: _numpy_mask(layer.weight, 0, layer.groups)
        if isinstance(layer, nn.ConvTranspose2d)
        else _numpy_mask(layer.weight, 1)
        for name, layer in net.named_modules()
        if name in LAYERS
    }


def _plain_step(net: nn.Module, masks: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The same network with weight * mask by plain operators; gradients reach the dense weights."""
    weights = {f"{name}.weight": net.get_submodule(name).weight * mask for name, mask in masks.items()}
    return torch.func.functional_call(net, weights, (x,))


@pytest.mark.parametrize("setting", [ONCE, ALWAYS, SR_STE], ids=["once", "always", "sr_ste"])
def test_outputs_and_gradients_are_those_of_the_masked_product(setting):
    plain = _net().double()
    masked = _masked(setting, plain)
    x = _batch().double()
    reference_input = x.clone().requires_grad_()
    masks = _expected_masks(plain)
    expected = _plain_step(plain, masks, reference_input)
    expected.square().sum().backward()
    own_input = x.clone().requires_grad_()
    result = masked(own_input)
    result.square().sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(own_input.grad, reference_input.grad)
    for (name, parameter), reference in zip(masked.named_parameters(), plain.parameters()):
        gradient = reference.grad.clone()
        layer = name.rpartition(".")[0]
        if setting is SR_STE and name.endswith("weight") and layer in masks:
            # Straight through: the gradient of the masked weight, and the decay where it is masked.
            effective = {n: (plain.get_submodule(n).weight * m).detach().requires_grad_() for n, m in masks.items()}
            again = _net().double()
            output = torch.func.functional_call(again, {f"{n}.weight": w for n, w in effective.items()}, (x,))
            output.square().sum().backward()
            gradient = effective[layer].grad + 0.05 * reference.detach() * ~masks[layer]
        torch.testing.assert_close(parameter.grad, gradient, msg=name)


def test_class_keys_and_behaviour_stay():
    plain = _net()
    masked = _masked(ALWAYS, plain)
    assert type(masked) is Net
    assert list(masked.state_dict()) == list(plain.state_dict())
    for name in LAYERS:
        layer, original = masked.get_submodule(name), plain.get_submodule(name)
        assert isinstance(layer, type(original))
        assert type(layer).__name__ == type(original).__name__
        assert repr(layer) == repr(original)
        assert isinstance(layer.weight, nn.Parameter)
    assert not masked_layers(plain)
    assert [name for name, _ in masked.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_the_original_is_untouched_even_by_training_the_copy():
    plain = _net()
    before = copy.deepcopy(plain.state_dict())
    masked = _masked(ONCE, plain)
    masked(_batch()).sum().backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name])


def _train(model: nn.Module, steps: int, optimizer: str = "SGD", accumulate: int = 1) -> list[dict[str, np.ndarray]]:
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
        "Rprop": lambda p: torch.optim.Rprop(p),
    }
    step = kinds[optimizer](model.parameters())
    history = []
    for number in range(steps):
        step.zero_grad()
        for part in range(accumulate):
            x = _batch(10 * number + part)
            functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 3])).backward()
        step.step()
        history.append(masks_of(model))
    return history


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "Rprop"])
def test_a_mask_chosen_once_stays_with_any_optimizer(optimizer):
    masked = _masked(ONCE)
    expected = _expected_masks(masked)
    history = _train(masked, 4, optimizer)
    masked.eval()
    masked(_batch())
    for masks in history:
        for name, mask in masks.items():
            assert (mask == expected[name].numpy()).all()
    for name in LAYERS:
        assert not masked.get_submodule(name).weight[~expected[name]].any()


def test_an_optimizer_that_moves_pruned_weights_is_caught_at_the_next_forward():
    masked = _masked(ONCE)
    masked(_batch())
    with torch.no_grad():
        for name in LAYERS:
            masked.get_submodule(name).weight.add_(0.01 * torch.randn(masked.get_submodule(name).weight.shape))
    output = masked.eval()(_batch())
    masks = {name: torch.from_numpy(mask) for name, mask in masks_of(masked).items()}
    for name in LAYERS:
        assert not masked.get_submodule(name).weight[~masks[name]].any()
    torch.testing.assert_close(output, _plain_step(finalize(masked), masks, _batch()))


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_masks_are_chosen_every_k_training_forwards(frequency):
    masked = _masked(NofMSetting(update_freq=frequency))
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.5)
    expected = None
    for number in range(8):
        if number % frequency == 0:
            expected = _expected_masks(masked)
        masked.train()
        loss = masked(_batch(number)).square().sum()
        for name, mask in masks_of(masked).items():
            assert (mask == expected[name].numpy()).all(), number
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Evaluation neither counts nor chooses.
        masked.eval()
        with torch.no_grad():
            masked(_batch())
        for name, mask in masks_of(masked).items():
            assert (mask == expected[name].numpy()).all(), number


def test_pruned_weights_can_come_back():
    masked = _masked(SR_STE)
    first = masks_of(masked)
    optimizer = torch.optim.SGD(masked.parameters(), lr=1.0)
    for number in range(5):
        optimizer.zero_grad()
        functional.cross_entropy(masked(_batch(number)), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
    last = masks_of(masked)
    assert any((~first[name] & last[name]).any() for name in LAYERS)


def test_gradient_accumulation_counts_every_forward_and_sums_gradients():
    masked = _masked(NofMSetting(update_freq=2))
    plain = copy.deepcopy(finalize(_masked(ONCE)))
    masks = _expected_masks(_net())
    for part in range(2):
        masked(_batch(part)).sum().backward()
        _plain_step(plain, masks, _batch(part)).sum().backward()
    torch.testing.assert_close(masked.head.weight.grad, plain.head.weight.grad)
    torch.testing.assert_close(masked.first.weight.grad, plain.first.weight.grad)


@pytest.mark.parametrize("setting", [ONCE, ALWAYS], ids=["once", "always"])
def test_deep_copies_and_pickles_keep_the_mask(setting):
    masked = _masked(setting)
    masked(_batch())
    twin = copy.deepcopy(masked)
    stream = io.BytesIO()
    pickle.dump(masked, stream)
    stream.seek(0)
    restored = pickle.load(stream)
    masked.eval()
    for other in (twin, restored):
        other.eval()
        torch.testing.assert_close(other(_batch()), masked(_batch()), rtol=0, atol=0)
        assert all((masks_of(other)[name] == masks_of(masked)[name]).all() for name in LAYERS)
    twin.train()
    with torch.no_grad():
        twin.head.weight.copy_(twin.head.weight.flip(1))
    twin(_batch())
    masked(_batch())
    if setting is ALWAYS:
        assert (masks_of(twin)["head"] != masks_of(masked)["head"]).any()


def test_weight_averaging_keeps_the_pattern():
    masked = _masked(ONCE)
    average = torch.optim.swa_utils.AveragedModel(
        masked, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        masked(_batch(number)).sum().backward()
        optimizer.step()
        average.update_parameters(masked)
    average.eval()
    average(_batch())
    sparse = finalize(average.module)
    for name in LAYERS:
        layer = sparse.get_submodule(name)
        axis, blocks = (0, layer.groups) if isinstance(layer, nn.ConvTranspose2d) else (1, 1)
        moved = layer.weight.detach().movedim(axis, -1).numpy()
        for part in np.split(moved, blocks, axis=-1):
            for start in range(0, part.shape[-1], 4):
                assert (np.count_nonzero(part[..., start : start + 4], axis=-1) <= 2).all()


@pytest.mark.parametrize("setting", [ONCE, ALWAYS, SR_STE], ids=["once", "always", "sr_ste"])
def test_autocast_and_bfloat16(setting):
    masked = _masked(setting)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = masked(_batch())
        with torch.no_grad():
            reference = _plain_step(_net(), _expected_masks(_net()), _batch())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert masked.first.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output, reference, rtol=0.05, atol=0.05)
    small = _masked(setting, _net().bfloat16())
    small(_batch().bfloat16()).sum().backward()
    assert small.second.weight.grad.dtype == torch.bfloat16
    if setting is not SR_STE:
        assert not small.second.weight.grad[~torch.from_numpy(masks_of(small)["second"])].any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frequency", [0, 1, 3])
def test_checkpointing_does_not_advance_the_counter(reentrant, frequency):
    masked = _masked(NofMSetting(update_freq=frequency))
    twin = copy.deepcopy(masked)
    for number in range(4):
        x = _batch(number).requires_grad_()
        masked.zero_grad()
        twin.zero_grad()
        torch.utils.checkpoint.checkpoint(masked, x, use_reentrant=reentrant).square().sum().backward()
        twin(_batch(number)).square().sum().backward()
        for (name, own), other in zip(masked.named_parameters(), twin.parameters()):
            torch.testing.assert_close(own.grad, other.grad, msg=name)
            with torch.no_grad():
                own -= 0.05 * own.grad
                other -= 0.05 * other.grad
        for name, mask in masks_of(masked).items():
            assert (mask == masks_of(twin)[name]).all()


def test_second_derivatives():
    masked = _masked(ALWAYS).double()
    x = _batch().double().requires_grad_()
    (slope,) = torch.autograd.grad(masked.eval()(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    plain = finalize(masked)
    masks = {name: torch.from_numpy(mask) for name, mask in masks_of(masked).items()}
    y = _batch().double().requires_grad_()
    (other,) = torch.autograd.grad(_plain_step(plain, masks, y).square().sum(), y, create_graph=True)
    other.square().sum().backward()
    torch.testing.assert_close(masked.second.weight.grad, plain.second.weight.grad)


def test_moving_to_another_device_and_type_takes_the_mask_along():
    masked = _masked(ALWAYS)
    masked(_batch())
    moved = copy.deepcopy(masked).to("meta")
    assert all(layer._openwork_mask.mask.is_meta for layer in masked_layers(moved).values())
    assert moved(_batch().to("meta")).shape == (4, 5)
    halved = copy.deepcopy(masked).to(torch.float64)
    assert (masks_of(halved)["first"] == masks_of(masked)["first"]).all()


def test_unbatched_images_and_keyword_inputs():
    masked = _masked(ALWAYS).eval()
    x = _batch()
    torch.testing.assert_close(masked.first(x[0]), masked.first(x)[0])
    torch.testing.assert_close(masked.up(input=torch.ones(16, 3, 3)), masked.up(torch.ones(1, 16, 3, 3))[0])
    size = masked.up(torch.ones(1, 16, 3, 3), output_size=[5, 5])
    assert size.shape[-2:] == (5, 5)


def test_inference_mode_first_then_training():
    masked = _masked(ALWAYS)
    with torch.inference_mode():
        masked.eval()(_batch())
    masked.train()(_batch()).sum().backward()
    assert masked.first.weight.grad is not None


def test_transformer_layers_use_the_mask_in_evaluation():
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    masked = apply_24(plain, {"linear1": ALWAYS, "linear2": ALWAYS})
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        masked(x)
        torch.testing.assert_close(masked(x), finalize(masked)(x))
        assert not torch.equal(masked(x), plain(x))
    assert "attention" in maskable_layers(plain)["self_attn.out_proj"]


def test_given_masks_are_in_force_until_the_next_choice():
    masked = _masked(NofMSetting(update_freq=2))
    given = {name: np.roll(mask, 1, axis=0 if name != "up" else 1) for name, mask in masks_of(masked).items()}
    load_masks(masked, given)
    for _ in range(2):
        masked(_batch())
        assert all((masks_of(masked)[name] == given[name]).all() for name in LAYERS)
    masked(_batch())
    assert any((masks_of(masked)[name] != given[name]).any() for name in LAYERS)


def test_a_model_that_never_ran_is_finalized_with_the_masks_of_its_weights():
    masked = _masked(ONCE)
    expected = _expected_masks(masked)
    sparse = finalize(masked)
    assert not masked_layers(sparse)
    for name in LAYERS:
        weight = sparse.get_submodule(name).weight
        assert type(sparse.get_submodule(name)) is type(_net().get_submodule(name))
        assert torch.equal(weight, masked.get_submodule(name).weight * expected[name])
        assert not torch.signbit(weight[~expected[name]]).any()


_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[_COMPILER, pytest.mark.slow])])
@pytest.mark.parametrize("setting", [ONCE, ALWAYS, SR_STE], ids=["once", "always", "sr_ste"])
def test_compiled_training_agrees(setting, backend):
    torch._dynamo.reset()
    masked = _masked(setting)
    twin = copy.deepcopy(masked)
    compiled = torch.compile(masked, backend=backend, fullgraph=True)
    for number in range(3):
        outputs = compiled(_batch(number)), twin(_batch(number))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        for model, output in zip((masked, twin), outputs):
            model.zero_grad()
            output.square().mean().backward()
        for model in (masked, twin):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name in LAYERS:
            pair = [finalize(model).get_submodule(name).weight for model in (masked, twin)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
            assert (masks_of(masked)[name] == masks_of(twin)[name]).all()


@pytest.mark.slow
@_COMPILER
def test_compiled_products_pull_by_the_decay_that_was_asked_for():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = apply_24(nn.Sequential(nn.Linear(8, 4)), {"0": SR_STE})
    compiled = copy.deepcopy(eager)
    x = torch.rand(16, 8)
    eager(x).sum().backward()
    torch.compile(compiled)(x).sum().backward()
    torch.testing.assert_close(compiled[0].weight.grad, eager[0].weight.grad)
