"""How much of the possible gain the channel-order search finds, and in what time, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/permutation24.py

Gain: (found - given order) / (half of each row's magnitudes kept freely - given order), in magnitude that 2:4 masks
keep. Matrices are normal random; then all of ResNet-50 with its initial weights, including the analysis and the
check that its outputs stay. Times are wall clock and, in brackets, processor time.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from openwork.sparsity.permutation import search_permutation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "torch"))

from nets.vision import allow_torchvision

allow_torchvision()
import torchvision  # noqa: E402

from openwork.torch.sparse24 import maskable_layers  # noqa: E402
from openwork.torch.sparse24.permute import permute_channels  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    print("| weights | gain found | time |\n|---|---|---|")
    for rows, channels, seconds in ((64, 128, 0.12), (256, 256, 2.0)):
        gains, walls, processors = [], [], []
        for seed in range(5):
            matrix = np.random.default_rng(seed).standard_normal((rows, channels), dtype=np.float32)
            wall, processor = time.perf_counter(), time.process_time()
            gains.append(search_permutation(matrix, seconds, seed).gain)
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
        print(
            f"| {rows}x{channels}, 5 seeds | {statistics.median(gains):.1%} (least {min(gains):.1%}) "
            f"| {statistics.median(walls):.2f} s ({statistics.median(processors):.2f} s) |",
            flush=True,
        )
    torch.manual_seed(0)
    model = torchvision.models.resnet50().eval()
    names = [name for name, why in maskable_layers(model).items() if not why]
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
    wall, processor = time.perf_counter(), time.process_time()
    report = permute_channels(model, image, names)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    with torch.no_grad():
        error = float((model(image) - expected).abs().max() / expected.abs().max())
    before, after = (sum(getattr(group, name) for group in report.groups) for name in ("before", "after"))
    print(
        f"| ResNet-50, {sum(not group.reason for group in report.groups)} of {len(report.groups)} groups "
        f"| {after / before - 1:+.2%} magnitude kept; outputs apart by {error:.0e} | {wall:.0f} s ({processor:.0f} s) |"
    )


if __name__ == "__main__":
    main()
