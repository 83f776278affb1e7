"""Programs that run as several processes of one gloo group."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

__all__ = ["as_rank", "needs_gloo", "run_ranks"]

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def run_ranks(program: str, folder: Path, size: int = 2) -> None:
    """Run `program` (a file) with the arguments rank, `size` and `folder` once a rank; all must end with 0."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(size), str(folder)],
            env=settings,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, f"rank {rank}: {errors}"
    finally:
        for process in processes:
            process.kill()


@contextlib.contextmanager
def as_rank() -> Iterator[tuple[int, Path]]:
    """Read the arguments that `run_ranks` gave, join the group, give rank and folder, and end the process.

    The process ends without Python's own tear-down: gloo's threads outlive `destroy_process_group` where
    DistributedDataParallel was used, and one that frees its last tensor during the tear-down aborts the process
    ("terminate called without an active exception"), whatever was computed before.
    """
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meeting = f"file://{folder / f'meeting_of_{size}'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    yield rank, folder
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
