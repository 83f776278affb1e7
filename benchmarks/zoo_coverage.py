"""Coverage: every network of the zoo, zero configuration, width ratio 0.5.

Each network runs in a process of its own with a time limit: analyse, prune, forward, backward, verify. MACs are
counted by `torch.utils.flop_counter` on both models, not by the engine. Seconds are those of analyze + prune;
"Torch-Pruning kept" is the share of MACs that Torch-Pruning 1.6.1 kept, or how it failed.

    python benchmarks/zoo_coverage.py                          # all, one at a time
    python benchmarks/zoo_coverage.py --only resnet50 --only swin_t
    python benchmarks/zoo_coverage.py --only timm:convnextv2_atto:224
    python benchmarks/zoo_coverage.py --markdown benchmarks/coverage.md
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "torch")]

MARK = "coverage-result: "
TOLERANCE = 1e-4


def measure(name: str, ratio: float) -> dict[str, Any]:
    """Everything about one network, as plain data. Runs in the child process."""
    import torch

    from nets.checks import example_call, forward_backward, multiply_accumulates
    from nets.zoo import find
    from openwork.torch import analyze, prune, verify

    torch.set_num_threads(1)
    net = find(name)
    model = net.build()
    inputs = net.inputs()
    result: dict[str, Any] = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
    with torch.no_grad():
        example_call(model, inputs)
    start = time.perf_counter()
    analysis = analyze(model, inputs)
    result["analyze_s"] = time.perf_counter() - start
    result["groups"] = len(analysis.groups)
    result["frozen"] = frozen_summary(analysis.frozen)
    start = time.perf_counter()
    pruned, plan = prune(model, inputs, ratio=ratio)
    result["prune_s"] = time.perf_counter() - start
    result["parameters_kept"] = sum(p.numel() for p in pruned.parameters()) / result["parameters"]
    result["macs"] = multiply_accumulates(model, inputs)
    result["macs_kept"] = multiply_accumulates(pruned, inputs) / result["macs"]
    result["missing"] = missing_rows(net.shrink, model, pruned)
    start = time.perf_counter()
    result["error"] = float(verify(model, pruned, plan, inputs))
    result["verify_s"] = time.perf_counter() - start
    forward_backward(pruned, inputs)
    try:
        forward_backward(pruned.train(), net.inputs(batch=2))
        result["train_mode"] = "runs"
    except Exception as error:
        result["train_mode"] = f"{type(error).__name__}: {error}"[:200]
    return result


def frozen_summary(frozen: list[Any]) -> list[tuple[str, int]]:
    """Reasons and the positions they hold, largest first."""
    sizes: collections.Counter[str] = collections.Counter()
    for entry in frozen:
        sizes[entry.reason] += sum(count for _, _, count in entry.members)
    return sizes.most_common(12)


def missing_rows(patterns: tuple[str, ...], model: Any, pruned: Any) -> list[str]:
    """The patterns of which no parameter lost rows."""
    import re

    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    after = {name: parameter.shape for name, parameter in pruned.named_parameters()}
    return [
        pattern
        for pattern in patterns
        if not any(re.search(pattern, name) and after[name][0] < before[name][0] for name in before)
    ]


def run_child(name: str, ratio: float, limit: float) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--ratio", str(ratio)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"name": name, "failure": f"no end within {limit:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)) | {"total_s": time.perf_counter() - start}
    last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:]
    return {"name": name, "failure": (last or [f"exit status {done.returncode}"])[0][:300], "stderr": done.stderr}


def run_here(name: str, ratio: float, limit: float) -> dict[str, Any]:
    """`measure` in this process: quicker, since frameworks load once, but one crash ends all."""

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"no end within {limit:.0f} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return measure(name, ratio)
    except Exception as error:
        return {"name": name, "failure": f"{type(error).__name__}: {error}"[:300], "stderr": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def passes(result: dict[str, Any]) -> bool:
    """Whether the network is covered: it ran, and the smaller model means the same."""
    return "failure" not in result and result["error"] <= TOLERANCE and not result["missing"]


def row(result: dict[str, Any]) -> str:
    """One line of the markdown table."""
    from nets.zoo import find

    net = find(result["name"])
    head = f"| {net.source} | {net.name} | {'yes' if passes(result) else '**no**'} "
    if "failure" in result:
        failure = result["failure"].replace("|", "\\|")
        return f"{head}| | | | {net.torch_pruning} | {failure} |"
    reasons = [f"{reason} ({count})" for reason, count in result["frozen"]]
    inner = [reason for reason in reasons if "input" not in reason.lower() and "output" not in reason.lower()]
    notes = "; ".join(inner[:2] or ["only inputs and outputs"])
    if result["missing"]:
        notes = "not pruned: " + ", ".join(result["missing"]) + "; " + notes
    if result["train_mode"] != "runs":
        notes += f"; train mode: {result['train_mode']}"
    notes = notes.replace("|", "\\|")
    seconds = result["analyze_s"] + result["prune_s"]
    figures = f"{seconds:.2f} | {result['macs_kept']:.3f} | {result['error']:.1e}"
    return f"{head}| {figures} | {net.torch_pruning} | {notes} |"


def table(results: list[dict[str, Any]], command: str) -> str:
    """The whole report in markdown."""
    covered = sum(map(passes, results))
    lines = [
        f"Made by `{command}`: {covered} of {len(results)} networks covered (verify error at most {TOLERANCE:g}).",
        "",
        "| source | network | covered | seconds | MACs kept | verify error | Torch-Pruning kept | frozen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *map(row, results)]) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run these; also timm:NAME:SIZE")
    parser.add_argument("--source", choices=("torchvision", "timm", "transformers"), help="run one source only")
    parser.add_argument("--extra", action="store_true", help="run the networks beside the 68 that were never tuned on")
    parser.add_argument("--in-process", action="store_true", help="no process of its own for each: for development")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time (default 1)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each network (default 240)")
    parser.add_argument("--ratio", type=float, default=0.5, help="share of channels to remove (default 0.5)")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured there")
    parser.add_argument("--verbose", action="store_true", help="print traces and all that was measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.child:
        print(MARK + json.dumps(measure(options.child, options.ratio)), flush=True)
        return 0
    from nets.zoo import EXTRA, ZOO
    from openwork.files import write_text

    unknown = [name for name in options.only if name not in ZOO and ":" not in name]
    if unknown:
        print(f"--only {unknown[0]}: not in the zoo", file=sys.stderr)
        return 2
    names = options.only or [n for n in ZOO if options.source in (None, ZOO[n].source)]
    names = list(EXTRA) if options.extra else names
    results = []
    warnings.simplefilter("ignore")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        run = map if options.in_process else pool.map  # signals reach the main thread only
        one = run_here if options.in_process else run_child
        for result in run(lambda name: one(name, options.ratio, options.limit), names):
            results.append(result)
            print(row(result), flush=True)
            if options.verbose:
                print(result.get("stderr", json.dumps(result, indent=1)), flush=True)
    report = table(results, "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    print("\n" + report.splitlines()[0])
    if options.markdown:
        write_text(options.markdown, report)
    if options.json:
        write_text(options.json, json.dumps(results, indent=1))
    return 0 if all(map(passes, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
