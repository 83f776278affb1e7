"""Two processes (gloo): the masks of all ranks are the same, and so is the training of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from ranks import as_rank, needs_gloo, run_ranks
from torch import nn

from openwork.config import NofMSetting
from openwork.torch.sparse24 import apply_24, masks_of

_STEPS = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 4))
    return apply_24(model, {"0": NofMSetting(update_freq=2), "3": NofMSetting()})


def _data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(step))


def _rank(rank: int, folder: Path) -> None:
    model = _model()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    for step in range(_STEPS):
        optimizer.zero_grad()
        # Each rank has its own half of the batch.
        parallel(_data(step)[2 * rank : 2 * rank + 2]).square().mean().backward()
        optimizer.step()
    np.savez(folder / f"{rank}.npz", **masks_of(model), weight=model[0].weight.detach().numpy())


@needs_gloo
def test_all_ranks_have_the_masks_of_one_process(tmp_path: Path):
    run_ranks(__file__, tmp_path)
    single = _model()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.5)
    for step in range(_STEPS):
        optimizer.zero_grad()
        single(_data(step)).square().mean().backward()
        optimizer.step()
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    for name, mask in masks_of(single).items():
        assert (ranks[0][name] == ranks[1][name]).all()
        assert (ranks[0][name] == mask).all()
    np.testing.assert_array_equal(ranks[0]["weight"], ranks[1]["weight"])
    np.testing.assert_allclose(ranks[0]["weight"], single[0].weight.detach().numpy(), atol=1e-5)


if __name__ == "__main__":
    with as_rank() as (rank, folder):
        _rank(rank, folder)
