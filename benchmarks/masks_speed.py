"""Speed of 2:4 masks on one thread, against two known ways, checked bit for bit against NumPy.

    OMP_NUM_THREADS=1 python benchmarks/masks_speed.py              # with numba, if it is installed
    OMP_NUM_THREADS=1 python benchmarks/masks_speed.py --numpy      # without

* best of six: the summed magnitude of each of the six patterns by one matrix product, arg max per group
  (the algorithm of NVIDIA's apex; written here from its description);
* topk + scatter: `torch.topk` per group, a scatter of ones.

Both get the weight with groups already made contiguous by torch itself where its layout needs it; that copy
is part of the measured time, as it is part of theirs. Runs alternate in one process; medians are printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from openwork.sparsity import compiled
from openwork.sparsity.masks import nm_mask

_PATTERNS = torch.tensor(
    [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.float32
)


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """[groups, 4] with groups along axis 1."""
    return weight.movedim(1, -1).reshape(-1, 4)


def _back(mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    moved = weight.movedim(1, -1)
    return mask.reshape(moved.shape).movedim(-1, 1).contiguous()


def best_of_six(weight: torch.Tensor) -> torch.Tensor:
    groups = _grouped(weight).abs()
    best = torch.argmax(groups @ _PATTERNS.t(), dim=1)
    return _back(_PATTERNS[best].bool(), weight)


def topk_scatter(weight: torch.Tensor) -> torch.Tensor:
    groups = _grouped(weight).abs()
    kept = groups.topk(2, dim=1).indices
    return _back(torch.zeros_like(groups, dtype=torch.bool).scatter_(1, kept, True), weight)


def numpy_reference(weight: np.ndarray) -> np.ndarray:
    """Stable sort of each group by falling magnitude, the first two stay."""
    moved = np.moveaxis(weight, 1, -1)
    groups = np.abs(moved).reshape(-1, 4)
    mask = np.zeros(groups.shape, dtype=bool)
    np.put_along_axis(mask, np.argsort(-groups, axis=1, kind="stable")[:, :2], True, axis=1)
    return np.moveaxis(mask.reshape(moved.shape), -1, 1)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    if "--numpy" in sys.argv[1:]:
        compiled.kernels = lambda: None
    print("compiled loops:", "none" if compiled.kernels() is None else "numba")
    print("| weight | element | best of six | topk + scatter | openwork | ratios | equals NumPy |")
    print("|---|---|---|---|---|---|---|")
    for shape in ((4096, 4096), (512, 512, 3, 3)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            weight = (weight * 30).to(dtype) if dtype == torch.int8 else weight.to(dtype)
            equal = np.array_equal(nm_mask(weight).numpy(), numpy_reference(weight.float().numpy()))
            ways: list[Callable[[], object]] = [lambda w=weight: nm_mask(w)]
            if dtype == torch.float32:
                ways = [lambda w=weight: best_of_six(w), lambda w=weight: topk_scatter(w), *ways]
            times: list[list[float]] = [[] for _ in ways]
            for _ in range(7):
                for way, taken in zip(ways, times):
                    taken.append(_seconds(way))
            rates = [weight.numel() / statistics.median(taken) / 1e6 for taken in times]
            others = [f"{rate:.0f} M/s" for rate in rates[:-1]] or ["-", "-"]
            ratios = ", ".join(f"{rates[-1] / rate:.1f}x" for rate in rates[:-1]) or "-"
            size = "x".join(map(str, shape))
            print(
                f"| {size} | {str(dtype)[6:]} | {' | '.join(others)} | {rates[-1]:.0f} M/s | {ratios} | {equal} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
