"""Does `cost: LATENCY` make a faster model than `cost: MACS` at the same accuracy-proxy?

For each network: search with MACs as the cost at the asked-for compression, note the sensitivity removed; search with
latency as the cost for the compression that removes no more than that; prune both for real, export, and time both with
onnxruntime on one thread, alternating, best and median of many runs. Times are processor time of the one thread,
which depends less than wall time on what else the machine does.

    python benchmarks/search_latency.py --markdown benchmarks/results/search_latency.md
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch")]

NETWORKS = ("resnet18", "mobilenet_v2", "squeezenet1_1", "regnet_x_400mf")


def times(paths: list[str], image: Any, runs: int) -> list[tuple[float, float]]:
    """(best, median) milliseconds of each file, the files taking turns."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(p, options, providers=["CPUExecutionProvider"]) for p in paths]
    feeds = [{session.get_inputs()[0].name: image.numpy()} for session in sessions]
    taken: list[list[float]] = [[] for _ in sessions]
    for run in range(runs + 3):
        for session, feed, record in zip(sessions, feeds, taken, strict=True):
            start = time.process_time()
            session.run(None, feed)
            if run >= 3:
                record.append(1e3 * (time.process_time() - start))
    return [(min(record), statistics.median(record)) for record in taken]


def compare(name: str, target: float, size: int, runs: int) -> dict[str, Any]:
    """Both searches on one network."""
    import torch

    import openwork.torch as ow
    from nets.zoo import find
    from openwork.search import SearchGroup, SearchProblem, group_widths, solve_greedy
    from openwork.search._algorithms import CURVES
    from openwork.search.cost import from_terms
    from openwork.torch.retrain.export import export_onnx
    from openwork.torch.search import LatencyMeter, TaylorLossSensitivity, latency_cost
    from openwork.torch.search._batches import Batch
    from openwork.torch.search._graph import SearchGraph
    from openwork.torch.structure import bind_inputs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = find(name).build().eval()
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        labels = torch.randint(0, model(images).shape[1], (2,))
    analysis = ow.analyze(model, images[:1])
    groups = analysis.groups
    sensitivity = TaylorLossSensitivity()
    sensitivity.setup_initialization((SearchGraph(model, groups), {}), [images, labels], 1)
    scores = sensitivity.scores(groups)
    power, evenness = CURVES[sensitivity.score_order]
    searched = tuple(
        SearchGroup(g.index, "", s, g.block_of, group_widths(g), evenness, g, g.steps, power, sensitivity.score_order)
        for g, s in zip(groups, scores, strict=True)
    )
    full = tuple(group.units for group in groups)
    by_macs = solve_greedy(SearchProblem(searched, from_terms("macs", analysis.costs), full, target))
    start = time.process_time()
    latency = latency_cost(model, Batch(bind_inputs(images[:1]), labels[:1]), groups, LatencyMeter())
    measuring = time.process_time() - start
    problem = SearchProblem(searched, latency, full, target)
    low, high, by_latency = 1.0, 8.0, None
    for _ in range(10):
        middle = (low + high) / 2
        found = solve_greedy(replace(problem, compress_ratio=middle))
        if found.reached and found.loss <= by_macs.loss:
            low, by_latency = middle, found
        else:
            high = middle
    assert by_latency is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for label, solution in (("full", None), ("macs", by_macs), ("latency", by_latency)):
            pruned = model if solution is None else ow.prune(model, images[:1], groups=solution.removed)[0]
            paths.append(str(Path(folder) / f"{label}.onnx"))
            export_onnx(pruned.eval(), [Path(paths[-1])], (images[:1],))
        measured = times(paths, images[:1], runs)
    return {
        "loss": (by_macs.loss, by_latency.loss),
        "predicted": [1e3 * latency.total(kept) for kept in (full, by_macs.kept, by_latency.kept)],
        "measured": measured,
        "measuring": measuring,
    }


def main() -> None:
    """Run all, print a line each, write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append")
    parser.add_argument("--target", type=float, default=2.0)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name in options.only or NETWORKS:
        row = compare(name, options.target, options.size, options.runs)
        full, by_macs, by_latency = row["measured"]
        rows.append(
            f"| {name} | {full[1]:.2f} | {by_macs[1]:.2f} | {by_latency[1]:.2f} | {by_latency[1] / by_macs[1]:.3f} | "
            f"{by_latency[0] / by_macs[0]:.3f} | {row['predicted'][2] / row['predicted'][1]:.3f} | "
            f"{row['loss'][1] / row['loss'][0]:.3f} | {row['measuring']:.1f} |"
        )
        print(rows[-1], flush=True)
    if options.markdown:
        head = (
            "| network | full, ms | cost MACS, ms | cost LATENCY, ms | ratio of medians | ratio of bests | "
            "predicted ratio | sensitivity removed, ratio | measuring, s |\n" + "|---" * 9 + "|\n"
        )
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        command = "python benchmarks/search_latency.py " + " ".join(sys.argv[1:])
        options.markdown.write_text(f"Made by `{command.strip()}`.\n\n{head}" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
