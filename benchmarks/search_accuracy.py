"""Accuracy after fine-tuning at equal MACs: openwork's search beside uniform pruning and Torch-Pruning.

Every method gets the same trained network, the same calibration samples and the same fine-tuning; each is brought to
the asked-for share of MACs (Torch-Pruning's ratio by bisection) and counted by `torch.utils.flop_counter`. Accuracy is
that on the whole test set.

    python benchmarks/search_accuracy.py --data fashion14 --steps 94 --seeds 3 --results accuracy.jsonl
    python benchmarks/search_accuracy.py --summary accuracy.jsonl

The exponents of the search's curve (docs/search.md) are compared on images that no other figure uses, `--curve` giving
power and evenness, `ALTERNATIVES` other ways to choose the channels inside a layer:

    python benchmarks/search_accuracy.py --data tuning14 --curve 2,1 --curve 2,2 --methods "" --results tuning.jsonl

Results are appended line by line; what stands there already is not run again. `--width` scales all channels, `--share`
is the share of MACs kept.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import openwork.torch as ow
from openwork.search import GreedySearch
from openwork.torch.search import (
    FisherMagnitudeSensitivity,
    FisherSensitivity,
    MagnitudeSensitivity,
    TaylorLossSensitivity,
)
from search_models import Attention, Split, accuracy, build, load, train

NETS = ("resnet20", "vgg", "mobilenet", "vit")
Method = Callable[[nn.Module, Tensor, list[Any], float], nn.Module]


def macs(model: nn.Module, image: Tensor) -> float:
    """Multiply-accumulates of one image, counted by torch."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
        model.eval()(image)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return counter.get_total_flops() / 2


def bisect(prune: Callable[[float], nn.Module], model: nn.Module, image: Tensor, share: float) -> nn.Module:
    """The model with the least ratio whose MACs are at most the share."""
    full = macs(model, image)
    low, high, best = 0.0, 0.95, None
    for _ in range(9):
        middle = (low + high) / 2
        try:
            candidate = prune(middle)
            left = macs(candidate, image) / full
        except Exception:  # a ratio that the tool cannot carry out counts as too large
            high = middle
            continue
        if left <= share:
            high, best = middle, candidate
        else:
            low = middle
    if best is None:
        raise RuntimeError("no ratio reaches the share")
    return best


def uniform(model: nn.Module, image: Tensor, batches: list[Any], share: float) -> nn.Module:
    """The same ratio everywhere, balanced L2."""
    return bisect(lambda ratio: ow.prune(model, image, ratio=ratio)[0], model, image, share)


def search(sensitivity: Any, algorithm: str | GreedySearch = "GreedySearch") -> Method:
    """openwork's search, through the config file."""

    def run(model: nn.Module, image: Tensor, batches: list[Any], share: float) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "search.cfg"
            config.write_text(
                f"compress_ratio: {1 / share}\nascend_optimized: false\ncost: MACS\ntest_iteration: {len(batches)}\n"
            )
            output = Path(folder) / "out.cfg"
            ow.auto_channel_prune_search(model, config, batches, output, sensitivity(), algorithm)
            return ow.create_prune_retrain_model(model, image, output, Path(folder) / "record.txt")

    return run


def torch_pruning(criterion: str, isomorphic: bool = False) -> Method:
    """Torch-Pruning, global, with its Taylor or L2 group importance.

    The fused qkv layers of the transformer are left alone: version 1.6.1 fails on them (an index out of range).
    """

    def run(model: nn.Module, image: Tensor, batches: list[Any], share: float) -> nn.Module:
        import torch_pruning as tp

        def prune(ratio: float) -> nn.Module:
            twin = copy.deepcopy(model).eval()
            attentions = [module for module in twin.modules() if isinstance(module, Attention)]
            head = [module for module in twin.modules() if isinstance(module, nn.Linear)][-1]
            taylor = criterion == "taylor"
            importance = (
                tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2)
            )
            pruner = tp.pruner.BasePruner(
                twin,
                image,
                importance=importance,
                global_pruning=True,
                isomorphic=isomorphic,
                pruning_ratio=ratio,
                ignored_layers=[head, *(module.qkv for module in attentions)],
            )
            if taylor:
                for images, labels in batches:
                    (F.cross_entropy(twin(images), labels) / len(batches)).backward()
            pruner.step()
            twin.zero_grad()
            twin(image)
            return twin

        return bisect(prune, model, image, share)

    return run


METHODS: dict[str, Method] = {
    "uniform L2": uniform,
    "openwork default": search(TaylorLossSensitivity),
    "openwork Fisher": search(FisherSensitivity),
    "openwork Fisher x L2": search(FisherMagnitudeSensitivity),
    "openwork magnitude": search(MagnitudeSensitivity),
    "openwork default by DP": search(TaylorLossSensitivity, "DynamicProgrammingSearch"),
    "TP Taylor": torch_pruning("taylor"),
    "TP L2": torch_pruning("l2"),
    "TP isomorphic Taylor": torch_pruning("taylor", isomorphic=True),
    "TP isomorphic L2": torch_pruning("l2", isomorphic=True),
}


class ByScores(TaylorLossSensitivity):
    """The default, but its scores choose the channels inside a layer too."""

    def scores(self, groups: Any) -> Any:
        found = super().scores(groups)
        self.rankings = None
        return found


class BySquares(TaylorLossSensitivity):
    """The default, but the mean squares of the slopes choose the channels inside a layer."""

    def scores(self, groups: Any) -> Any:
        found = super().scores(groups)
        squares = FisherSensitivity()
        squares.graph, squares.batches = self.graph, self.batches
        self.rankings = squares.scores(groups)
        return found


ALTERNATIVES: dict[str, Method] = {
    "ranked by scores": search(ByScores),
    "ranked by squares": search(BySquares),
}


def curve(text: str) -> tuple[str, Method]:
    """The default with other exponents, from ``power,evenness``."""
    power, evenness = (float(part) for part in text.split(","))
    name = f"power {power:g} evenness {evenness:g}"
    return name, search(TaylorLossSensitivity, GreedySearch(evenness=evenness, power=power))


def trained(options: argparse.Namespace, net: str, seed: int, size: int, split: Split) -> nn.Module:
    """The network, trained; kept under --weights."""
    width = options.width if net != "mobilenet" else max(options.width, 1.0)
    path = options.weights / f"{options.data}_{net}_{seed}.pt"
    torch.manual_seed(seed)
    model = build(net, size, width)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        epochs = options.epochs * (2 if net == "vit" else 1)
        train(model, split, epochs, 0.1, seed, is_vit=net == "vit")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()


RIVALS = ("uniform L2", "TP Taylor", "TP L2", "TP isomorphic Taylor")


def leads(path: Path) -> str:
    """The default against the rival with the best mean: the paired difference over the seeds and its standard error."""
    cells: dict[Any, dict[str, dict[int, float]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        cells[row["data"], row["net"], row["share"]][row["method"]][row["seed"]] = 100 * row["accuracy"]
    lines = ["| data | network | MACs kept | best rival | default ahead by | seeds |", "|---|---|---|---|---|---|"]
    for (data, net, share), cell in sorted(cells.items()):
        own = cell["openwork default"]
        # A method that failed for some seeds is no rival.
        whole = {name: cell[name] for name in RIVALS if own and cell[name].keys() >= own.keys()}
        if not whole:
            continue
        best = max(whole, key=lambda name: np.mean([whole[name][seed] for seed in own]))
        ahead = np.array([own[seed] - whole[best][seed] for seed in own])
        error = ahead.std(ddof=1) / len(ahead) ** 0.5
        lines.append(f"| {data} | {net} | {share:g} | {best} | {ahead.mean():+.2f} ± {error:.2f} | {len(ahead)} |")
    return "\n".join(lines)


def summary(path: Path) -> str:
    """Mean and spread over the seeds, as a table."""
    cells: dict[Any, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        cells[row["data"], row["net"], row["share"]][row["method"]].append(row["accuracy"])
    seen = dict.fromkeys(name for cell in cells.values() for name in cell if name != "before")
    names = [*(name for name in METHODS if name in seen), *(name for name in seen if name not in METHODS)]
    lines = [
        "| data | network | MACs kept | seeds | before | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 5),
    ]
    for (data, net, share), cell in sorted(cells.items()):
        values = {name: np.array(cell[name]) for name in names if cell.get(name)}
        best = max(values, key=lambda name: values[name].mean())
        shown = []
        for name in names:
            if name not in values:
                shown.append("")
                continue
            text = f"{100 * values[name].mean():.2f} ± {100 * values[name].std():.2f}"
            shown.append(f"**{text}**" if name == best else text)
        seeds = max(len(v) for v in values.values())
        before = f"{100 * np.mean(cell['before']):.2f}" if cell.get("before") else ""
        lines.append(f"| {data} | {net} | {share:g} | {seeds} | {before} | " + " | ".join(shown) + " |")
    means = []
    for name in names:
        found = [100 * np.mean(cell[name]) for cell in cells.values() if cell.get(name)]
        means.append(f"{np.mean(found):.2f}" if len(found) == len(cells) else "")
    lines.append("| all | mean over cells | | | | " + " | ".join(means) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion14", choices=("digits", "fashion14", "fashion28", "tuning14"))
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--curve", action="append", default=[], help="also the default with other power,evenness")
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="end of the range of seeds")
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--steps", type=int, default=94, help="fine-tuning steps of 64 images")
    parser.add_argument("--weights", type=Path, default=Path("build/search_weights"))
    parser.add_argument("--results", type=Path, default=Path("build/search_accuracy.jsonl"))
    parser.add_argument("--summary", type=Path)
    options = parser.parse_args()
    if options.summary:
        print(summary(options.summary))
        print("\n" + leads(options.summary))
        return
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    methods = {name: (METHODS | ALTERNATIVES)[name] for name in options.methods.split(",") if name} | dict(
        map(curve, options.curve)
    )
    done = set()
    if options.results.exists():
        for line in options.results.read_text().splitlines():
            row = json.loads(line)
            done.add((row["data"], row["net"], row["share"], row["seed"], row["method"]))
    split, test, size = load(options.data)
    for seed in range(options.first_seed, options.seeds):
        for net in options.nets.split(","):
            model = trained(options, net, seed, size, split)
            order = torch.randperm(len(split[1]), generator=torch.Generator().manual_seed(seed))[:256]
            batches = [(split[0][pick], split[1][pick]) for pick in order.split(64)]
            image = split[0][:1]
            full, before = macs(model, image), None
            for share in options.share or (0.25, 0.5):
                for name in ("before", *methods):
                    key = (options.data, net, share, seed, name)
                    if key in done:
                        continue
                    start = time.perf_counter()
                    row = dict(zip(("data", "net", "share", "seed", "method"), key, strict=True))
                    if name == "before":
                        before = accuracy(model, test) if before is None else before
                        row |= {"accuracy": before, "macs": 1.0}
                    else:
                        try:
                            pruned = methods[name](model, image, batches, share)
                            row["macs"] = round(macs(pruned, image) / full, 4)
                            raw = accuracy(pruned, test)
                            train(pruned, split, options.steps / (len(split[1]) // 64), 0.05, seed, is_vit=net == "vit")
                            row |= {"accuracy": accuracy(pruned, test), "without_tuning": raw}
                        except Exception as error:
                            print(json.dumps(row | {"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
                            continue
                    row["seconds"] = round(time.perf_counter() - start, 1)
                    print(json.dumps(row), flush=True)
                    with options.results.open("a") as stream:
                        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
