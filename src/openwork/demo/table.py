"""The table at the end: dense beside pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from openwork.report.analysis import short_count

__all__ = ["comparison"]

# Row, key of the results, and how its value reads.
_ROWS = (
    ("accuracy (test)", "accuracy", lambda value: f"{value:.2%}"),
    ("parameters", "parameters", short_count),
    ("MACs, one image", "macs", short_count),
    ("ONNX file", "bytes", lambda value: f"{short_count(value)}B"),
    ("latency, one image", "latency_1", lambda value: f"{value * 1e3:.3f} ms"),
    ("latency, 64 images", "latency_64", lambda value: f"{value * 1e3:.2f} ms"),
)


def comparison(results: Mapping[str, Any], what: str = "half of the channels pruned") -> Table:
    """Rows accuracy, parameters, MACs, file size and latency; columns dense, pruned, and dense / pruned."""
    table = Table(title=f"ResNet-20 on digits, {what}", title_justify="left")
    table.add_column("")
    for column in ("dense", "pruned", "ratio"):
        table.add_column(column, justify="right")
    for label, key, text in _ROWS:
        dense, pruned = results["dense"][key], results["pruned"][key]
        # Latencies were timed in turn: the median of their ratios is steadier than the ratio of medians.
        ratio = results["ratio"].get(key, dense / pruned)
        difference = f"{100 * (pruned - dense):+.2f} points" if key == "accuracy" else f"{ratio:.2f}x"
        table.add_row(label, text(dense), text(pruned), difference)
    return table
