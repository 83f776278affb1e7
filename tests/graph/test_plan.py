"""Plans are data: round trip, damage, and that nothing but data is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from openwork.errors import FileError, RecordError
from openwork.graph.groups import Role
from openwork.graph.plan import Cut, GroupCut, Plan, Repair


def example() -> Plan:
    cuts = (
        Cut("a.weight", 0, Role.PRODUCES, 8, 1, np.array([1, 2, 7])),
        Cut("b.weight", 1, Role.CONSUMES, 16, 2, np.array([0, 3, 8, 9]), (0, 12)),
    )
    return Plan((GroupCut(4, 8, 5, 1, cuts),), (Repair("net", "heads", 12, 6), Repair("", "sizes", [8, 8], [5, 8])))


def test_round_trip(tmp_path: Path) -> None:
    plan = example()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.repairs == plan.repairs
    (group,) = again.groups
    assert (group.index, group.units_before, group.units_after, group.blocks) == (4, 8, 5, 1)
    for cut, read in zip(plan.cuts, again.cuts, strict=True):
        assert (read.parameter, read.axis, read.role, read.size, read.blocks, read.span) == (
            cut.parameter,
            cut.axis,
            cut.role,
            cut.size,
            cut.blocks,
            cut.span,
        )
        assert read.removed.tolist() == cut.removed.tolist()
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format"),
        ({"version": 7}, "version is 7"),
        ({"groups": 3}, "damaged"),
        ({"repairs": [["a"]]}, "damaged"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "plan.json"
    example().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=words):
        Plan.load(path)


@pytest.mark.parametrize("removed", ["7-9", "3,3", "5,2", "0-7", "x"])
def test_impossible_positions_are_refused(tmp_path: Path, removed: str) -> None:
    path = tmp_path / "plan.json"
    example().save(path)
    content = json.loads(path.read_text())
    content["groups"][0]["cuts"][0]["removed"] = removed
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError):
        Plan.load(path)


def test_not_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(RecordError, match="not JSON"):
        Plan.load(path)
    with pytest.raises(FileError, match="does not exist"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(FileError, match="folder"):
        Plan.load(tmp_path)


def test_the_layer_of_a_cut_is_written_where_the_parameter_does_not_say_it(tmp_path: Path) -> None:
    cut = Cut("w", 3, Role.PRODUCES, 4, 1, np.array([2]), layer="a/b.c/Conv2D")
    Plan((GroupCut(0, 4, 3, 1, (cut,)),)).save(tmp_path / "plan.json")
    (loaded,) = Plan.load(tmp_path / "plan.json").cuts
    assert loaded.module == "a/b.c/Conv2D"
    assert loaded.parameter == "w"


def test_a_plan_is_told_in_lines(tmp_path: Path) -> None:
    plan = Plan(
        (GroupCut(0, 4, 2, 1, (Cut("a.weight", 0, Role.PRODUCES, 4, 1, np.array([1, 3]), (0, 4)),)),),
        (Repair("a", "out_features", 4, 2),),
    )
    assert str(plan).splitlines() == [
        "<Plan: 1 groups, 1 attributes>",
        "group 0: 4 -> 2 units of a",
        "a.out_features: 4 -> 2",
    ]


def test_a_mark_before_the_text_is_read_over(tmp_path: Path) -> None:
    Plan().save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "marked.json").write_text(text, encoding="utf-8-sig")
    assert Plan.load(tmp_path / "marked.json").groups == ()


def test_lists_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(RecordError, match="nested too deep"):
        Plan.load(tmp_path / "plan.json")
