"""Budget and speed of the channel search on networks of torchvision and timm, random weights and data.

For each network, target and alignment: the config is searched and the model is really pruned with it. Printed are
the MACs before over those after, counted by `torch.utils.flop_counter` on both models; whether the target is met,
and whether giving back one step of any layer would miss it (the search's own figures); and the processor seconds
of the parts. Processor time, not wall time: it hardly depends on what else the machine does.

    python benchmarks/search_budget.py --markdown benchmarks/results/search_budget.md
    python benchmarks/search_budget.py --only resnet50 --target 2
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch")]

NETWORKS = (
    "resnet18",
    "resnet50",
    "vgg16_bn",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "densenet121",
    "efficientnet_b0",
    "squeezenet1_0",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "vit_tiny_patch16_224",
    "convnext_tiny",
)
TARGETS = (1.2, 1.5, 2.0, 3.0)


def search(name: str, target: float, aligned: bool, batch: int) -> dict[str, Any]:
    """One search and its figures."""
    import numpy as np
    import torch

    import openwork.torch as ow
    from nets.checks import multiply_accumulates
    from nets.zoo import find
    from openwork.search import GreedySearch
    from openwork.torch.search import TaylorLossSensitivity

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = find(name)
    model = net.build().eval()
    given = net.inputs()
    first = given[0] if isinstance(given, tuple) else given
    images = torch.randn(batch, *first.shape[1:])
    with torch.no_grad():
        labels = torch.randint(0, model(images).shape[1], (batch,))
    timed = {"search": 0.0, "sensitivity": 0.0, "passes": 0.0}

    class Algorithm(GreedySearch):
        def channel_prune_search(self, *arguments: Any) -> dict[str, list[int]]:
            start = time.process_time()
            result = super().channel_prune_search(*arguments)
            timed["search"] += time.process_time() - start
            return result

    class Sensitivity(TaylorLossSensitivity):
        def get_sensitivity(self, records: Any) -> None:
            start = time.process_time()
            super().get_sensitivity(records)
            timed["sensitivity"] += time.process_time() - start

    def passes() -> float:
        """One forward and backward pass, as the sensitivity needs it."""
        start = time.process_time()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        model.zero_grad()
        return time.process_time() - start

    timed["passes"] = min(passes() for _ in range(2))
    ow.analyze(model, images)  # loads what torch loads on first use
    algorithm = Algorithm()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "search.cfg"
        config.write_text(f"compress_ratio: {target}\nascend_optimized: {str(aligned).lower()}\ncost: MACS\n")
        output = Path(folder) / "out.cfg"
        start = time.process_time()
        ow.auto_channel_prune_search(model, config, [images, labels], output, Sensitivity(), algorithm)
        total = time.process_time() - start
        pruned = ow.create_prune_retrain_model(model, images, output, Path(folder) / "record.txt").eval()
    problem, solution = algorithm.solved, algorithm.solution
    assert problem is not None
    assert solution is not None
    tight = True
    for group in problem.groups:
        place = group.widths.index(solution.kept[group.index])
        if place:
            kept = np.array(solution.kept)
            kept[group.index] = group.widths[place - 1]
            tight &= problem.cost.total(kept.tolist()) > problem.budget
    achieved = multiply_accumulates(model, images) / multiply_accumulates(pruned, images)
    return {
        "name": name,
        "target": target,
        "aligned": aligned,
        "achieved": achieved,
        "most": problem.full_cost / problem.least_cost,
        "reached": solution.reached,
        "tight": bool(tight),
        "groups": len(problem.groups),
        "total": total,
        "rest": total - min(timed["passes"], timed["sensitivity"]),
        **timed,
    }


def main() -> None:
    """Run all, print a line each, write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="network; may be repeated")
    parser.add_argument("--target", action="append", type=float)
    parser.add_argument("--aligned", choices=("yes", "no"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in options.only or NETWORKS:
        for aligned in (False, True):
            if options.aligned is not None and aligned != (options.aligned == "yes"):
                continue
            for target in options.target or TARGETS:
                row = search(name, target, aligned, options.batch)
                verdict = "within one step" if row["reached"] and row["tight"] else "the most possible"
                if not row["reached"] and row["achieved"] < row["most"] * 0.999:
                    verdict = "MISSED"
                rows.append(
                    f"| {name} | {target:g} | {'yes' if aligned else 'no'} | {row['achieved']:.3f} | {verdict} | "
                    f"{row['groups']} | {row['total']:.2f} | {row['passes']:.2f} | {row['rest']:.2f} | "
                    f"{row['search']:.3f} |"
                )
                print(rows[-1], flush=True)
    if options.markdown:
        head = (
            "| network | target | aligned | achieved | verdict | groups | whole search, s | forward + backward, s | "
            "rest, s | algorithm alone, s |\n|---|---|---|---|---|---|---|---|---|---|\n"
        )
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        command = "python benchmarks/search_budget.py " + " ".join(sys.argv[1:])
        options.markdown.write_text(f"Made by `{command.strip()}`.\n\n{head}" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
