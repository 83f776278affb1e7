"""Time of `create_prune_retrain_model` on ResNet-50 with a 2x3x64x64 input, one thread.

AMCT took 2.84 s for the same call on a machine of this kind; the bar is a quarter of that. Wall-clock and
processor time are both shown: on a machine shared with other work only the second one is telling.

    python benchmarks/create_resnet50.py
    python benchmarks/create_resnet50.py --rounds 15 --profile 25
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch")]

AMCT = 2.84  # seconds
BAR = AMCT / 4
CONFIG = (
    "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: true } } }\n"
)


def measured(work: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Wall-clock and processor seconds of each round, after one round to warm up."""
    work()
    wall, processor = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return wall, processor


def parts(model: Any, inputs: Any, config: Path, record: Path, rounds: int) -> dict[str, float]:
    """Median processor seconds of the parts of one call, called one after the other as the flow does."""
    from openwork.config import load_retrain_config
    from openwork.graph.settle import settle
    from openwork.record import Record, save_record
    from openwork.torch.analysis import Analysis
    from openwork.torch.prune import PrunePlan
    from openwork.torch.retrain.channels import choose, settings_of
    from openwork.torch.retrain.records import records_from_plan
    from openwork.torch.structure import bind_inputs
    from openwork.torch.surgery import apply_plan
    from openwork.torch.trace import trace

    taken: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any], *values: Any) -> Any:
        start = time.process_time()
        result = work(*values)
        taken.setdefault(name, []).append(time.process_time() - start)
        return result

    for _ in range(rounds):
        read = timed("read the config", load_retrain_config, config)
        bound = bind_inputs(inputs)
        traced = timed("trace the forward on shapes", trace, model, bound)
        settled = timed("settle labels into groups", settle, traced.store)
        analysis = Analysis(model, bound, traced, settled)
        settings = timed("resolve the settings", settings_of, read, analysis)
        chosen = timed("rank the channels", choose, analysis, settings, {})
        found = timed("plan and repair", analysis.plan, chosen)
        plan = PrunePlan(*found)
        timed("cut a copy", apply_plan, model, plan)
        made = timed("make the record", records_from_plan, plan, model)
        timed("write the record", save_record, Record(channels=made), record)
    return {name: statistics.median(times) for name, times in taken.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds after one to warm up (default 9)")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N most expensive functions")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    import torch

    from nets.zoo import allow_torchvision
    from openwork.torch import create_prune_retrain_model

    torch.set_num_threads(1)
    allow_torchvision()
    import torchvision

    torch.manual_seed(0)
    model, inputs = torchvision.models.resnet50(weights=None), torch.randn(2, 3, 64, 64)
    with tempfile.TemporaryDirectory() as folder:
        config, record = Path(folder) / "prune.cfg", Path(folder) / "record.txt"
        config.write_text(CONFIG)

        def create() -> Any:
            return create_prune_retrain_model(model, inputs, str(config), str(record))

        wall, processor = measured(create, options.rounds)
        median = statistics.median(wall)
        print(f"create_prune_retrain_model, ResNet-50, 2x3x64x64, {options.rounds} rounds, torch {torch.__version__}")
        print(f"wall-clock   median {median:.3f} s, least {min(wall):.3f}, most {max(wall):.3f}")
        print(f"processor    median {statistics.median(processor):.3f} s, least {min(processor):.3f}")
        print(f"AMCT         {AMCT} s: {AMCT / median:.1f} times faster (bar: 4.0, {BAR:.2f} s)")
        for name, seconds in parts(model, inputs, config, record, options.rounds).items():
            print(f"  {name:<30}{seconds:.3f} s")
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(create)
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
