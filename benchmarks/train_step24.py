"""Cost of 2:4 masks in training: ResNet-50, input 2x3x64x64, one thread; update_freq 0 and 1 to dense.

    OMP_NUM_THREADS=1 python benchmarks/train_step24.py             # with numba, if it is installed
    OMP_NUM_THREADS=1 python benchmarks/train_step24.py --numpy     # without

* Step: processor time of forward, backward and SGD with momentum. Masked and dense steps alternate on one and
  the same model, in the same memory, by exchanging the classes of its layers; where weights lie in memory alone
  moves a step by 20 %. The learning rate is 0, so that dense steps leave pruned weights at zero. Median of the
  ratios of neighbouring steps.
* Checkpoint: size of the saved state_dict.
* Memory: bytes of the mask, and how far the peak of torch's allocator within one step lies above the dense
  one, both per masked weight.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "torch"))

from nets.vision import allow_torchvision

allow_torchvision()
import torchvision  # noqa: E402

from openwork.config import GradMode, NofMSetting  # noqa: E402
from openwork.sparsity import compiled  # noqa: E402
from openwork.torch.sparse24 import apply_24, maskable_layers, masked_layers, masks_of  # noqa: E402

_WAYS = {
    "update_freq 0": NofMSetting(update_freq=0),
    "update_freq 1": NofMSetting(update_freq=1),
    "update_freq 1, SR-STE": NofMSetting(update_freq=1, grad_mode=GradMode.SR_STE),
}
_ROUNDS = 15


class Trainer:
    """A masked model with its optimizer and a fixed batch; its masks can be switched off and on."""

    def __init__(self, setting: NofMSetting) -> None:
        torch.manual_seed(0)
        dense = torchvision.models.resnet50()
        layers = [name for name, reason in maskable_layers(dense).items() if not reason]
        self.model = apply_24(dense, dict.fromkeys(layers, setting))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4)
        self.images = torch.randn(2, 3, 64, 64)
        self.labels = torch.tensor([1, 2])
        self._layers = list(masked_layers(self.model).values())
        self._masked: list[Any] = [type(layer) for layer in self._layers]

    def switch(self, on: bool) -> None:
        for layer, masked in zip(self._layers, self._masked):
            layer.__class__ = masked if on else masked._openwork_plain

    def step(self) -> float:
        start = time.process_time()
        loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - start

    def peak(self) -> int:
        """Bytes that one step takes at most from torch's allocator, above what is held before it.

        The profiler sees memory freed only if it saw it taken, so a step before the one that counts is watched too.
        """
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            self.step()
            with torch.profiler.record_function("the step"):
                self.step()
        events = profile.profiler.kineto_results.events()
        start = next(event.start_ns() for event in events if event.name() == "the step")
        memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        before = held = peak = sum(size for when, size in memory if when < start)
        for when, size in memory:
            if when >= start:
                held += size
                peak = max(peak, held)
        return peak - before


def _checkpoint_bytes(model: nn.Module) -> int:
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    return stream.tell()


def main() -> None:
    torch.set_num_threads(1)
    if "--numpy" in sys.argv[1:]:
        compiled.kernels = lambda: None
    print("compiled loops:", "none" if compiled.kernels() is None else "numba")
    dense_file = _checkpoint_bytes(torchvision.models.resnet50())
    rows = []
    for way, setting in _WAYS.items():
        trainer = Trainer(setting)
        dense, masked = [], []
        for number in range(_ROUNDS + 2):
            for on, times in ((False, dense), (True, masked)):
                trainer.switch(on)
                taken = trainer.step()
                if number >= 2:
                    times.append(taken)
        peak = trainer.peak()
        trainer.switch(False)
        above = peak - trainer.peak()
        trainer.switch(True)
        masks = masks_of(trainer.model)
        weights = sum(mask.size for mask in masks.values())
        ratio = statistics.median(own / other for own, other in zip(masked, dense))
        rows.append(
            f"| {way} | {statistics.median(dense) * 1e3:.0f} ms | {statistics.median(masked) * 1e3:.0f} ms "
            f"| {ratio:.3f}x | {_checkpoint_bytes(trainer.model) / dense_file:.4f}x "
            f"| {sum(mask.nbytes for mask in masks.values()) / weights:.2f} + {above / weights:.3f} bytes |"
        )
    print("| training | dense step | masked step | to dense | checkpoint to dense | memory per masked weight |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
