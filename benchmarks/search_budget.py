"""Budget and speed of the channel search on networks of torchvision and timm, random weights and data.

For each network, target and alignment: the config is searched and the model is really pruned with it. Printed are
the MACs before over those after, counted by `torch.utils.flop_counter` on both models; whether the target is met,
and whether giving back one step of any layer would miss it (the search's own figures); and the processor seconds
of the parts (processor time: it depends less than wall time on what else the machine does). Scores are computed once
for each network and used for all its targets; the columns of seconds of the later rows leave them out.

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
    "vgg11_bn",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "densenet121",
    "efficientnet_b0",
    "squeezenet1_1",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "deit_tiny_patch16_224",
    "convnext_tiny",
)
TARGETS = (1.2, 1.5, 2.0, 3.0)


class Subject:
    """A network with its data; scores are computed at the first search and kept."""

    def __init__(self, name: str, size: int, batch: int) -> None:
        import torch

        import openwork.torch as ow
        from nets.zoo import find

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.name = name
        net = find(name)
        self.model = net.build().eval()
        given = net.inputs()
        first = given[0] if isinstance(given, tuple) else given
        side = first.shape[-1] if "224" in name else size
        self.images = torch.randn(batch, 3, side, side)
        with torch.no_grad():
            self.labels = torch.randint(0, self.model(self.images).shape[1], (batch,))
        self.scores: dict[int, Any] = {}
        self.timed = {"search": 0.0, "passes": min(self._passes() for _ in range(2))}
        ow.analyze(self.model, self.images)  # loads what torch loads on first use

    def _passes(self) -> float:
        """Processor seconds of one forward and backward pass, as the sensitivity needs it."""
        import torch

        start = time.process_time()
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.model.zero_grad()
        return time.process_time() - start

    def search(self, target: float, aligned: bool) -> dict[str, Any]:
        """One search and its figures."""
        import openwork.torch as ow
        from nets.checks import multiply_accumulates
        from openwork.search import GreedySearch
        from openwork.torch.search import TaylorLossSensitivity

        subject = self
        scored = bool(self.scores)

        class Algorithm(GreedySearch):
            def channel_prune_search(self, *arguments: Any) -> dict[str, list[int]]:
                start = time.process_time()
                result = super().channel_prune_search(*arguments)
                subject.timed["search"] = time.process_time() - start
                return result

        class Sensitivity(TaylorLossSensitivity):
            def scores(self, groups: Any) -> Any:
                if not subject.scores:
                    subject.scores = {0: super().scores(groups)}
                return subject.scores[0]

        algorithm = Algorithm()
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "search.cfg"
            config.write_text(f"compress_ratio: {target}\nascend_optimized: {str(aligned).lower()}\ncost: MACS\n")
            output = Path(folder) / "out.cfg"
            start = time.process_time()
            data = [self.images, self.labels]
            ow.auto_channel_prune_search(
                self.model, config, data, output, Sensitivity(piece=len(self.labels)), algorithm
            )
            total = time.process_time() - start
            pruned = ow.create_prune_retrain_model(self.model, self.images, output, Path(folder) / "record.txt").eval()
        problem, solution = algorithm.solved, algorithm.solution
        assert problem is not None
        assert solution is not None
        tight = True
        for group in problem.groups:
            place = group.widths.index(solution.kept[group.index])
            if place:
                kept = list(solution.kept)
                kept[group.index] = group.widths[place - 1]
                tight &= problem.cost.total(kept) > problem.budget
        passes = 0.0 if scored else self.timed["passes"]
        return {
            "achieved": multiply_accumulates(self.model, self.images) / multiply_accumulates(pruned, self.images),
            "most": problem.full_cost / problem.least_cost,
            "reached": solution.reached,
            "tight": bool(tight),
            "groups": len(problem.groups),
            "total": total,
            "passes": passes,
            "rest": total - passes,
            "search": self.timed["search"],
        }


def main() -> None:
    """Run all, print a line each, write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="network; may be repeated")
    parser.add_argument("--target", action="append", type=float)
    parser.add_argument("--aligned", choices=("yes", "no"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="of the images, where the network takes any")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in options.only or NETWORKS:
        subject = Subject(name, options.size, options.batch)
        for aligned in (False, True):
            if options.aligned is not None and aligned != (options.aligned == "yes"):
                continue
            for target in options.target or TARGETS:
                row = subject.search(target, aligned)
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
