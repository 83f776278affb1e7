"""Both algorithms behind AMCT's interface, and a class written against AMCT."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.errors import ConfigError
from openwork.search import (
    DynamicProgrammingSearch,
    GreedySearch,
    SearchChannelBase,
    get_algorithm,
    get_attribute,
)
from openwork.search.testing import SearchChannelSuite


class TestGreedy(SearchChannelSuite):
    def make(self):
        return GreedySearch()


class TestGreedyWithoutEvenness(SearchChannelSuite):
    def make(self):
        return GreedySearch(evenness=0.0)


class TestDynamicProgramming(SearchChannelSuite):
    def make(self):
        return DynamicProgrammingSearch()


class OneByOne(SearchChannelBase):
    """As a user of AMCT would write it: attributes, update_graph, no openwork structures."""

    def channel_prune_search(self, graph_info, search_records, prune_config):
        target, aligned, most = prune_config
        total = sum(layer["bitops"] for layer in graph_info.values())
        masks = {r.producer[0].name: [1] * graph_info[r.producer[0].name]["ori_cout"] for r in search_records}
        step = 16 if aligned else 1
        while total / sum(layer["bitops"] for layer in graph_info.values()) < target:
            best = None
            for index, record in enumerate(search_records):
                node = record.producer[0]
                scores = np.array(get_attribute(node, "sensitivity"))
                mask = np.array(masks[node.name])
                left = int(mask.sum())
                count = left % step or step
                if left - count < max(1, len(mask) * (1 - most)):
                    continue
                alive = np.flatnonzero(mask)
                gone = alive[np.argsort(scores[alive], kind="stable")[:count]]
                value = scores[gone].sum() / get_attribute(node, "bitops") / count
                if best is None or value < best[0]:
                    best = (value, index, node.name, gone)
            if best is None:
                break
            for channel in best[3]:
                masks[best[2]][channel] = 0
            self.update_graph({best[1]: len(best[3])}, graph_info, search_records)
        return masks


class TestUserClass(SearchChannelSuite):
    exact = False

    def make(self):
        return OneByOne()


def test_names():
    assert isinstance(get_algorithm("GreedySearch"), GreedySearch)
    assert isinstance(get_algorithm(DynamicProgrammingSearch), DynamicProgrammingSearch)
    mine = OneByOne()
    assert get_algorithm(mine) is mine
    with pytest.raises(ConfigError, match="search_alg 'GreedySerch' is unknown; did you mean 'GreedySearch'"):
        get_algorithm("GreedySerch")
    with pytest.raises(ConfigError, match="no method channel_prune_search"):
        get_algorithm(3)
