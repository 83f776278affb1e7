"""Tests that any search algorithm has to pass; run them on your own.

    from openwork.search.testing import SearchChannelSuite

    class TestMySearch(SearchChannelSuite):
        def make(self):
            return MySearch()

pytest collects the inherited tests. They call `channel_prune_search` with AMCT's structures only. An algorithm
that does not aim at an exact hit may set `exact` to False; then the target must be met, however far.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from openwork.graph.groups import Member, PruneGroup, Role
from openwork.search._base import SearchChannelBase
from openwork.search._problem import permitted_widths
from openwork.search._records import (
    GraphInfo,
    get_attribute,
    make_record,
    problem_of_records,
    refresh_gains,
    set_attribute,
)

__all__ = ["SearchChannelSuite", "chain_of_layers"]


def chain_of_layers(widths: Sequence[int], seed: int = 0) -> tuple[GraphInfo, list[Any]]:
    """Graph info and scored records of layers ``conv0 -> conv1 -> ... -> head``, each reading the one before.

    Args:
        widths: output channels of the convolutions; the input has 3 channels, the head 10 outputs.
        seed: of the sensitivities and feature-map sizes.

    Returns:
        graph_info and one record for each convolution.
    """
    random = np.random.default_rng(seed)
    names = [*(f"conv{index}" for index in range(len(widths))), "head"]
    info: GraphInfo = {}
    before = 3
    for name, width in zip(names, [*widths, 10], strict=True):
        bitops = float(before * width * 9 * 1024 * random.integers(16, 1024))
        info[name] = {"cin": before, "cout": width, "ori_cout": width, "bitops": bitops}
        before = width
    records = []
    for index, width in enumerate(widths):
        channels = np.arange(width)
        members = (
            Member(f"conv{index}.weight", 0, Role.PRODUCES, width, channels, channels),
            Member(f"{names[index + 1]}.weight", 1, Role.CONSUMES, width, channels, channels),
        )
        record = make_record(
            PruneGroup(index, width, members, np.zeros(width, dtype=np.int64), np.ones(1, dtype=np.int64))
        )
        set_attribute(record.producer[0], "sensitivity", random.gamma(1.0, size=width))
        records.append(record)
    refresh_gains(info, records)
    return info, records


class SearchChannelSuite:
    """Subclass it and give `make`.

    Attributes:
        exact: whether giving back any one step must miss the target.
    """

    exact: ClassVar[bool] = True

    def make(self) -> SearchChannelBase:
        """A new algorithm object."""
        raise NotImplementedError

    def search(
        self, widths: Sequence[int], config: tuple[float, bool, float], seed: int = 0
    ) -> tuple[GraphInfo, list[Any], dict[str, list[int]]]:
        """Run the algorithm on a chain of layers; what it got is returned unchanged."""
        info, records = chain_of_layers(widths, seed)
        masks = self.make().channel_prune_search(copy.deepcopy(info), copy.deepcopy(records), config)
        return info, records, masks

    def ratio(self, info: GraphInfo, kept: dict[str, int]) -> float:
        """Compression when each convolution keeps so many channels, written out."""
        full = pruned = 0.0
        left = 1.0
        for name, layer in info.items():
            share = kept.get(name, layer["cout"]) / layer["cout"]
            full += layer["bitops"]
            pruned += layer["bitops"] * left * share
            left = share
        return full / pruned

    def test_masks_fit_the_layers(self) -> None:
        """A 0 or 1 for each channel of each producer."""
        info, records, masks = self.search([16, 32, 24], (1.5, False, 1.0))
        assert set(masks) == {record.producer[0].name for record in records}
        for name, mask in masks.items():
            assert len(mask) == info[name]["ori_cout"], name
            assert set(mask) <= {0, 1}, name

    def test_no_layer_loses_all_channels(self) -> None:
        """Even when the target asks for nearly everything."""
        _, _, masks = self.search([8, 8, 8], (50.0, False, 1.0))
        assert all(sum(mask) >= 1 for mask in masks.values())

    def test_reaches_the_target(self) -> None:
        """Aligned or not, and no further than one step when `exact`."""
        for aligned in (False, True):
            for target in (1.2, 2.0, 3.0):
                widths = [64, 48, 64, 96]
                config = (target, aligned, 1.0)
                info, _, masks = self.search(widths, config, seed=3)
                kept = {name: sum(mask) for name, mask in masks.items()}
                assert self.ratio(info, kept) >= target * (1 - 1e-6), (target, aligned, kept)
                if not self.exact:
                    continue
                for name, width in zip(kept, widths, strict=True):
                    steps = sorted(permitted_widths(width, align=16 if aligned else 1))
                    wider = [step for step in steps if step > kept[name]]
                    if wider:
                        assert self.ratio(info, {**kept, name: wider[0]}) < target, (target, aligned, name)

    def test_alignment(self) -> None:
        """Kept channels are multiples of 16, or all."""
        _, _, masks = self.search([64, 40, 128], (2.0, True, 1.0))
        for mask in masks.values():
            assert sum(mask) % 16 == 0 or sum(mask) == len(mask)

    def test_largest_share(self) -> None:
        """No layer loses more than max_prune_ratio."""
        for share in (0.25, 0.5):
            _, _, masks = self.search([64, 40, 128], (10.0, False, share))
            for name, mask in masks.items():
                assert mask.count(0) <= share * len(mask) + 1e-6, name

    def test_lower_sensitivity_goes_first(self) -> None:
        """Inside a layer no channel goes while a less sensitive one stays."""
        _, records, masks = self.search([32, 32, 32], (1.8, False, 1.0))
        for record in records:
            scores = np.asarray(get_attribute(record.producer[0], "sensitivity"))
            mask = np.asarray(masks[record.producer[0].name])
            if 0 < mask.sum() < len(mask):
                assert scores[mask == 0].max() <= scores[mask == 1].min()

    def test_same_answer_twice(self) -> None:
        """Nothing depends on chance or on an earlier call."""
        first = self.search([32, 48], (1.7, False, 1.0))[2]
        assert first == self.search([32, 48], (1.7, False, 1.0))[2]

    def test_beats_the_same_share_everywhere(self) -> None:
        """Less sensitivity is removed than by thinning all layers alike to the same cost."""
        info, records, masks = self.search([64, 64, 64, 64], (2.0, False, 1.0), seed=5)
        problem = problem_of_records(info, records, (2.0, False, 1.0))
        removed = uniform = 0.0
        share = next(
            share
            for share in np.arange(0.01, 1, 0.01)
            if self.ratio(info, {g.name: g.units - round(g.units * share) for g in problem.groups}) >= 2.0
        )
        for group in problem.groups:
            removed += float(group.scores[np.asarray(masks[group.name]) == 0].sum())
            uniform += float(np.sort(group.scores)[: round(group.units * share)].sum())
        assert removed < uniform
