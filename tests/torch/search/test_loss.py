"""The default loss against torch's own, and labels that do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from openwork.errors import ConfigError, ModelError
from openwork.torch.search._batches import Batch
from openwork.torch.search._loss import compute_loss, default_loss
from openwork.torch.structure import bind_inputs


def test_class_indices():
    scores = torch.randn(4, 5)
    labels = torch.tensor([0, 4, 2, 1])
    assert default_loss(scores, labels) == F.cross_entropy(scores, labels)
    assert default_loss(scores, labels[:, None].int()) == F.cross_entropy(scores, labels)
    assert default_loss((scores, None), labels) == F.cross_entropy(scores, labels)
    assert default_loss(SimpleNamespace(logits=scores), labels) == F.cross_entropy(scores, labels)


def test_class_indices_of_pixels_and_tokens():
    maps, pixels = torch.randn(2, 5, 3, 3), torch.randint(0, 5, (2, 3, 3))
    assert default_loss(maps, pixels) == F.cross_entropy(maps, pixels)
    tokens, words = torch.randn(2, 7, 11), torch.randint(0, 11, (2, 7))
    assert torch.allclose(default_loss(tokens, words), F.cross_entropy(tokens.reshape(-1, 11), words.reshape(-1)))


def test_label_like_the_output():
    output, label = torch.randn(3, 4), torch.randn(3, 4)
    assert default_loss(output, label) == (output - label).abs().mean()
    both = default_loss((output, output), (label, output))
    assert torch.allclose(both, (output - label).abs().mean())


@pytest.mark.parametrize(
    ("output", "label", "message"),
    [
        (torch.randn(4, 5), torch.randn(4), r"shape \(4,\) \(torch.float32\) does not fit the output's shape \(4, 5\)"),
        (torch.randn(4, 5), torch.tensor([0, 5, 1, 2]), "labels are 0 to 5; the output has 5 classes, 0 to 4"),
        (torch.randn(4, 5), torch.tensor([0, -1, 1, 2]), "labels are -1 to 2"),
        (torch.randn(4, 5), torch.zeros(3, dtype=torch.long), "does not fit"),
        (torch.randn(4, 5), [1, 2], "the label is a list"),
    ],
)
def test_labels_that_do_not_fit(output, label, message):
    with pytest.raises(ConfigError, match=message):
        default_loss(output, label)


def run(model, label=None, loss=None):
    return compute_loss(model, Batch(bind_inputs(torch.randn(2, 3)), label), loss)


def test_own_loss_and_failures():
    model = torch.nn.Linear(3, 4)
    assert run(model, 2.0, lambda output, label: (output * label).sum(1)).ndim == 0
    with pytest.raises(ConfigError, match="the loss is a float"):
        run(model, None, lambda output, label: 1.0)
    with pytest.raises(ConfigError, match=r"cannot be computed .*no such thing"):
        run(model, None, lambda output, label: (_ for _ in ()).throw(KeyError("no such thing")))
    with pytest.raises(ConfigError, match="the loss on input_data is nan"):
        run(model, torch.full((2, 4), float("nan")))
    with pytest.raises(ModelError, match="forward of Linear fails on input_data"):
        run(torch.nn.Linear(5, 4), torch.zeros(2, 4))
    with pytest.raises(ModelError, match="without a floating-point tensor"):
        default_loss("text", torch.zeros(2))


def test_model_that_computes_its_loss():
    class Model(torch.nn.Module):
        def forward(self, x):
            return SimpleNamespace(loss=x.sum(), logits=x)

    assert torch.isfinite(run(Model()))
