"""Tables of the 2:4 index: which two of four elements are kept, for every pattern of non-zeros.

A *code* is one byte with bit e set when element e of eight (two groups of four) is not zero. An *index byte*
holds two nibbles ``idx0 | idx1 << 2``, the first group in the low nibble: slot 0 is element ``idx0``, slot 1 is
element ``1 + idx1``, both in 0..2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["CORRUPT", "STYLES", "TOO_MANY", "Style", "nibble_positions", "source_table", "style_tables"]

STYLES = ("canonical", "atc", "ascendc", "torch")
"""How groups with fewer than two non-zeros are written; every style is read."""

# (idx0, idx1) for the non-zero patterns that leave a slot free, keyed by the set of non-zero elements.
# With two non-zeros a < b all styles say (a, b - 1).
_FREE: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {
    "canonical": {(): (0, 0), (0,): (0, 0), (1,): (1, 1), (2,): (2, 2), (3,): (0, 2)},
    "atc": {(): (0, 0), (0,): (0, 0), (1,): (1, 0), (2,): (2, 1), (3,): (0, 2)},
    "ascendc": {(): (0, 0), (0,): (0, 0), (1,): (1, 0), (2,): (2, 0), (3,): (0, 2)},
    # What torch.sparse and CUTLASS choose: always an ordered pair, late positions when there is nothing.
    "torch": {(): (2, 2), (0,): (0, 1), (1,): (1, 1), (2,): (2, 2), (3,): (2, 2)},
}

TOO_MANY = 0xFF
"""Entry of `Style.index` for a code with more than two non-zeros in a group."""

CORRUPT = 100
"""Entry of `source_table` for a nibble that holds the value 3: past any column, so that a lookup fails."""


@dataclass(frozen=True, eq=False)
class Style:
    """Lookup tables of one style.

    Attributes:
        index: uint8 [256], code -> index byte, `TOO_MANY` where a group has more than two non-zeros.
        keep: uint64 [256], code -> eight bytes of 0 or 1 (in memory order): the element fills a slot. Always
            four ones, two per group, so that selecting by it gives values in slot order.
        covered: uint8 [256], code -> bits of the elements that decoding writes. Smaller than `keep` where both
            slots point at one element.
    """

    index: npt.NDArray[np.uint8]
    keep: npt.NDArray[np.uint64]
    covered: npt.NDArray[np.uint8]


def _group(code: int, style: str) -> tuple[int, tuple[int, int], int]:
    """Nibble, kept elements in slot order, and covered bits for the four-bit pattern `code`."""
    elements = tuple(element for element in range(4) if code >> element & 1)
    first, second = _FREE[style][elements] if len(elements) < 2 else (elements[0], elements[1] - 1)
    # The values are the elements at the picked places. A style whose slots meet, or whose slots are out of
    # order, stores the same values as the canonical one: the non-zero first, then a zero.
    kept = (first, 1 + second)
    if kept[0] >= kept[1]:
        canonical = _FREE["canonical"][elements]
        kept = (canonical[0], 1 + canonical[1])
    return first | second << 2, kept, 1 << first | 1 << (1 + second)


@cache
def style_tables(style: str) -> Style:
    """The tables of a style in `STYLES`."""
    index = np.full(256, TOO_MANY, np.uint8)
    keep = np.zeros((256, 8), np.uint8)
    covered = np.zeros(256, np.uint8)
    keep[:, (0, 1, 4, 5)] = 1
    for code in range(256):
        low, high = code & 15, code >> 4
        if low.bit_count() > 2 or high.bit_count() > 2:
            continue
        low_nibble, low_kept, low_covered = _group(low, style)
        high_nibble, high_kept, high_covered = _group(high, style)
        index[code] = low_nibble | high_nibble << 4
        covered[code] = low_covered | high_covered << 4
        keep[code] = 0
        keep[code, [*low_kept, *(4 + element for element in high_kept)]] = 1
    for table in (index, keep, covered):
        table.setflags(write=False)
    return Style(index, keep.view(np.uint64).reshape(256), covered)


def nibble_positions(nibble: int) -> tuple[int, int] | None:
    """The elements that slots 0 and 1 of `nibble` point at, or None when the nibble is corrupt."""
    first, second = nibble & 3, nibble >> 2
    if first == 3 or second == 3:
        return None
    return first, 1 + second


@cache
def source_table() -> npt.NDArray[np.int8]:
    """int8 [256, 8]: for each element of an index byte, which of its four values it takes; 4 means zero.

    Elements of corrupt nibbles have `CORRUPT`. Where both slots point at one element, slot 0 is taken.
    """
    table = np.full((256, 8), 4, np.int8)
    for byte in range(256):
        for group, nibble in enumerate((byte & 15, byte >> 4)):
            positions = nibble_positions(nibble)
            if positions is None:
                table[byte, 4 * group : 4 * group + 4] = CORRUPT
                continue
            table[byte, 4 * group + positions[1]] = 2 * group + 1
            table[byte, 4 * group + positions[0]] = 2 * group
    table.setflags(write=False)
    return table
