"""Learned clip ranges: whether training left them usable."""

from __future__ import annotations

import math

__all__ = ["NARROWEST", "range_fault"]

NARROWEST = 1e-7
"""Ranges below this have no room for 256 levels."""


def range_fault(low: float, high: float) -> str:
    """Why a clip range that was calibrated cannot be saved, in words after the layer's name; empty if it can.

    Args:
        low, high: its ends as they were learned; 0 is always inside, so a lower end above it counts as 0.
    """
    if not math.isfinite(low) or not math.isfinite(high):
        why = "is not finite"
    elif max(high, 0.0) - min(low, 0.0) < NARROWEST:
        why = "has crossed ends" if high < low else "has no width"
    else:
        return ""
    return (
        f"its learned clip range {why} ({low:g} to {high:g}): training diverged; go back to an earlier checkpoint, or "
        "train with a smaller learning rate or a given clip_max_min"
    )
