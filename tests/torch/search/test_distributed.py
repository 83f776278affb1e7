"""Two processes (gloo), three batches: the search writes what one process writes, once."""

from __future__ import annotations

from pathlib import Path

from ranks import as_rank, needs_gloo, run_ranks

import openwork.torch as amct
from openwork.torch.search.testing import small_net


def _search(folder: Path, out: Path) -> None:
    net, images, labels = small_net(3)
    data = [(images[i : i + 2], labels[i : i + 2]) for i in (0, 2, 4)]
    amct.auto_channel_prune_search(net, folder / "search.cfg", data, out / "out.cfg")


@needs_gloo
def test_two_processes_write_what_one_writes(tmp_path: Path):
    (tmp_path / "search.cfg").write_text("compress_ratio: 1.6 ascend_optimized: false test_iteration: 3")
    _search(tmp_path, tmp_path / "single")
    run_ranks(__file__, tmp_path)
    single = (tmp_path / "single" / "out.cfg").read_text()
    assert (tmp_path / "rank0" / "out.cfg").read_text() == single
    assert not (tmp_path / "rank1").exists()


if __name__ == "__main__":
    with as_rank() as (rank, folder):
        _search(folder, folder / f"rank{rank}")
