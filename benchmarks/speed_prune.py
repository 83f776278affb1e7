"""Speed: openwork's analyze + prune beside Torch-Pruning's dependency graph + pruner + step.

One process, one thread, alternating, medians of processor time; networks that both can prune. The clock runs over
the work on a fresh copy of the model, not over building or copying it. Python's garbage collector runs between the
measurements, not inside: a full pass over all that torch and timm have made costs a quarter of a second, wherever
it happens to fall.

Two floors stand beside them, for tools that run the model's Python once and return a new model, and do nothing else:
one plain forward and one `copy.deepcopy`; and one forward on meta tensors (shapes only, no arithmetic) with one copy of
the module tree that shares every weight. The meta model is made outside the clock. A tool that works shapes out itself
can be below the second.

    python benchmarks/speed_prune.py                              # all such networks of the zoo
    python benchmarks/speed_prune.py --only resnet50 --rounds 5
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch")]

SLOW = 15.0  # seconds; where Torch-Pruning takes longer, one round has to do


def with_openwork(model: Any, inputs: Any) -> None:
    from openwork.torch import analyze, prune

    prune(model, inputs, ratio=0.5, analysis=analyze(model, inputs))


def with_openwork_prune(model: Any, inputs: Any) -> None:
    from openwork.torch import prune

    prune(model, inputs, ratio=0.5)


def with_torch_pruning(model: Any, inputs: Any) -> None:
    import torch_pruning
    from torch import nn

    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1000]
    pruner = torch_pruning.pruner.MagnitudePruner(
        model,
        inputs,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=heads,
    )
    pruner.step()


def floor(model: Any, inputs: Any) -> None:
    import torch

    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    copy.deepcopy(model)


def shape_floor(model: Any, inputs: Any) -> None:
    import torch

    from openwork.torch.structure import copy_structure

    with torch.no_grad():
        model(*inputs.args, **inputs.kwargs)
    copy_structure(model, lambda name, tensor: tensor)


def on_meta(model: Any, inputs: Any) -> tuple[Any, Any]:
    """The model and its inputs as shapes."""
    from openwork.torch.structure import bind_inputs, shape_only

    return copy.deepcopy(model).to("meta"), bind_inputs(inputs).to(shape_only)


def seconds(work: Callable[[Any, Any], None], model: Any, inputs: Any) -> float:
    fresh, inputs = on_meta(model, inputs) if work is shape_floor else (copy.deepcopy(model), inputs)
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        work(fresh, inputs)
        return time.process_time() - start
    finally:
        gc.enable()


def compare(name: str, rounds: int) -> list[float]:
    """Medians in seconds: openwork analyze + prune, openwork prune alone, Torch-Pruning, the two floors.

    The second floor is not a number where the model does not run on meta tensors as it is.
    """
    from nets.zoo import ZOO

    net = ZOO[name]
    model, inputs = net.build(), net.inputs()
    contenders = (with_openwork, with_openwork_prune, with_torch_pruning, floor, shape_floor)
    taken: list[list[float]] = [[] for _ in contenders]
    for index in range(rounds + 1):
        for times, work in zip(taken, contenders):
            try:
                times.append(seconds(work, model, inputs))
            except (RuntimeError, NotImplementedError):
                if work is not shape_floor:
                    raise
                times.append(math.nan)
        if index == 0 and taken[2][0] < SLOW:
            for times in taken:  # the first round warms up imports and caches
                times.clear()
        elif taken[2][0] >= SLOW:
            break
    return [statistics.median(times) for times in taken]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up (default 3)")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    import torch

    from nets.zoo import ZOO, allow_torchvision
    from openwork.files import write_text

    torch.set_num_threads(1)
    allow_torchvision()
    names = [net.name for net in ZOO.values() if net.torch_pruning_kept is not None]
    names = [name for name in names if name in options.only or not options.only]
    lines = [
        "| network | analyze + prune, s | prune alone, s | Torch-Pruning, s | ratio | floor, s | its ratio "
        "| floor on shapes, s | its ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    ratios: list[float] = []
    floors: list[float] = []
    shapes: list[float] = []
    for name in names:
        try:
            ours, prune_alone, theirs, least, on_shapes = compare(name, options.rounds)
        except Exception as error:
            line = f"| {name} | | | | {type(error).__name__}: {str(error)[:80]} | | | | |"
        else:
            ratios.append(theirs / ours)
            floors.append(theirs / least)
            line = f"| {name} | {ours:.3f} | {prune_alone:.3f} | {theirs:.3f} | {theirs / ours:.1f} "
            line += f"| {least:.3f} | {theirs / least:.1f} | {on_shapes:.3f} | {theirs / on_shapes:.1f} |"
            if not math.isnan(on_shapes):
                shapes.append(theirs / on_shapes)
        lines.append(line)
        print(line, flush=True)
    if ratios:
        summary = f"{len(ratios)} networks: geometric mean {statistics.geometric_mean(ratios):.1f} times faster, "
        summary += f"least {min(ratios):.1f}, most {max(ratios):.1f}; "
        summary += f"one forward and one copy: {statistics.geometric_mean(floors):.1f} times; "
        summary += f"the same on shapes ({len(shapes)} networks): {statistics.geometric_mean(shapes):.1f} times."
        print("\n" + summary)
        if options.markdown:
            command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
            write_text(options.markdown, f"Made by `{command}`. {summary}\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
