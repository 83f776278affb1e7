"""Training and testing the demo's network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from openwork.demo.console import progress
from openwork.demo.data import Digits

__all__ = ["accuracy", "train"]

_BATCH = 64


def train(model: nn.Module, digits: Digits, epochs: int, rate: float, step: str, seed: int = 0) -> None:
    """Train in place: SGD with momentum, one cycle of the learning rate (Smith & Topin 2017), batches of 64.

    Args:
        model: the network.
        digits: the data.
        epochs: passes over the training images.
        rate: highest learning rate.
        step: what the progress bar says.
        seed: of the order of the images.
    """
    count = len(digits.train_images)
    batches = -(-count // _BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * batches)
    order = torch.Generator().manual_seed(seed)
    model.train()
    with progress(step, epochs * batches) as advance:
        for epoch in range(epochs):
            for index, chosen in enumerate(torch.randperm(count, generator=order).split(_BATCH)):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
                loss.backward()
                optimizer.step()
                schedule.step()
                advance(epoch * batches + index + 1)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of the test images that the model, in eval mode, classifies as labelled."""
    model.eval()
    with torch.no_grad():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).double().mean())
