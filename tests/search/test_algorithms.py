"""Both algorithms behind AMCT's interface, and a class written against AMCT."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from openwork.errors import ConfigError
from openwork.graph.groups import Member, PruneGroup, Role
from openwork.search import (
    DynamicProgrammingSearch,
    GreedySearch,
    SearchChannelBase,
    get_algorithm,
    get_attribute,
    make_record,
)
from openwork.search.testing import SearchChannelSuite
from search.synthetic import chain


class TestGreedy(SearchChannelSuite):
    def make(self):
        return GreedySearch()


class TestGreedyOnPlainSums(SearchChannelSuite):
    def make(self):
        return GreedySearch(evenness=0.0, power=1.0)


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


@pytest.mark.parametrize("algorithm", [GreedySearch, DynamicProgrammingSearch])
@pytest.mark.parametrize(
    ("order", "arguments", "power", "evenness"),
    [(0, {}, 2, 2), (1, {}, 2, 1), (2, {}, 1, 1), (1, {"evenness": 0}, 2, 0), (2, {"power": 3.0}, 3, 1)],
)
def test_the_curve_follows_the_order_of_the_scores(algorithm, order, arguments, power, evenness):
    problem, _ = chain(1)
    search = algorithm(**arguments)
    search.problem = replace(problem, groups=tuple(replace(g, score_order=order) for g in problem.groups))
    records = [make_record(PruneGroup(g.index, g.units, (_member(g),), g.block_of, g.per_step)) for g in problem.groups]
    search.channel_prune_search({}, records, (1.7, False, 1.0))
    for group, before in zip(search.solved.groups, problem.groups):
        assert (group.power, group.evenness) == (power, evenness)
        assert np.array_equal(group.scores, before.scores)
    expected = 0.0
    for group, kept in zip(problem.groups, search.solution.kept):
        for gone, score in enumerate(np.sort(group.scores)[: group.units - kept]):
            expected += (score * (group.units / (group.units - gone)) ** evenness) ** power
    assert search.solution.loss == pytest.approx(expected)


def _member(group):
    places = np.arange(group.units)
    return Member(f"{group.name}.weight", 0, Role.PRODUCES, group.units, places, places)


@pytest.mark.parametrize("arguments", [{"evenness": -1}, {"power": 0}, {"power": float("nan")}])
def test_exponents_are_checked(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=f"GreedySearch: {name} is {value}; allowed: a number >"):
        GreedySearch(**arguments)


def test_names():
    assert isinstance(get_algorithm("GreedySearch"), GreedySearch)
    assert isinstance(get_algorithm(DynamicProgrammingSearch), DynamicProgrammingSearch)
    mine = OneByOne()
    assert get_algorithm(mine) is mine
    with pytest.raises(ConfigError, match="search_alg 'GreedySerch' is unknown; did you mean 'GreedySearch'"):
        get_algorithm("GreedySerch")
    with pytest.raises(ConfigError, match="no method channel_prune_search"):
        get_algorithm(3)
