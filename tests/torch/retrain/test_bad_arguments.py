"""Every argument of AMCT's functions and of the native ones, wrong in every way: one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import openwork.torch as amct
from bad_arguments import NO_PATHS, leftovers, refusal, wrong_calls
from nets.retrain import SmallNet, channels_config, written
from openwork.errors import OpenworkError
from openwork.torch import PrunePlan

IMAGE = torch.randn(2, 3, 16, 16)
PATHS = ("config_defination", "record_file", "pth_file", "save_path", "config", "output_cfg", "path")
SEARCH = "compress_ratio: 1.5"


@pytest.fixture
def calls(tmp_path: Path) -> dict[Any, dict[str, Any]]:
    """Arguments with which each function works."""
    config, search = written(tmp_path, channels_config()), written(tmp_path, SEARCH, "search.cfg")
    record, weights = str(tmp_path / "record.txt"), str(tmp_path / "weights.pth")
    pruned = amct.create_prune_retrain_model(SmallNet(), IMAGE, config, record)
    torch.save(pruned.state_dict(), weights)
    plan = amct.prune(SmallNet(), IMAGE)[1]
    plan.save(tmp_path / "plan.json")
    create = {"model": SmallNet(), "input_data": IMAGE, "config_defination": config, "record_file": record}
    save = {"model": pruned, "save_path": str(tmp_path / "out"), "input_data": IMAGE}
    return {
        amct.create_prune_retrain_model: create,
        amct.create_compressed_retrain_model: create,
        amct.restore_prune_retrain_model: {**create, "pth_file": weights},
        amct.restore_compressed_retrain_model: {**create, "pth_file": weights},
        amct.save_prune_retrain_model: save,
        amct.save_compressed_retrain_model: {**save, "record_file": record},
        amct.auto_channel_prune_search: {
            "model": SmallNet(), "config": search, "input_data": [[IMAGE, torch.zeros(2, dtype=torch.long)]],
            "output_cfg": str(tmp_path / "found.cfg"),
        },
        PrunePlan.load: {"path": tmp_path / "plan.json"},
        plan.save: {"path": tmp_path / "plan.json"},
    }  # fmt: skip


def test_paths(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    before = leftovers(tmp_path, set())
    tried = 0
    for call, name, value, arguments in wrong_calls(calls, PATHS, NO_PATHS):
        if name == "save_path" and value == "":
            continue  # the working directory without a prefix, as in AMCT
        message = refusal(call, arguments)
        assert message.startswith(f"{name} is {value!r}") or (value == "" and name in message), (call, message)
        tried += 1
    assert tried > 100
    assert not leftovers(tmp_path, before)


@pytest.mark.parametrize("model", [None, SmallNet, nn.Conv2d, "model", lambda x: x])
def test_models(calls: dict[Any, dict[str, Any]], model: Any, tmp_path: Path) -> None:
    plan = PrunePlan.load(tmp_path / "plan.json")
    every = calls | {
        amct.analyze: {"model": None, "inputs": IMAGE},
        amct.prune: {"model": None, "inputs": IMAGE},
        amct.verify: {"model": None, "pruned": SmallNet(), "plan": plan, "inputs": IMAGE},
        plan.apply: {"model": None},
    }
    for call, _, value, arguments in wrong_calls(every, ("model",), (model,)):
        message = refusal(call, arguments)
        assert "model" in message
        if isinstance(value, type):
            assert f"is the class {value.__name__}; " in message
            assert message.endswith(f"an instance: {value.__name__}(...)")
    with_class = {"model": SmallNet(), "pruned": SmallNet, "plan": plan, "inputs": IMAGE}
    assert "pruned is the class SmallNet" in refusal(amct.verify, with_class)


def test_other_arguments(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    """Of the wrong kind, whatever they are."""
    for call, name, value, arguments in wrong_calls(calls, ("state_dict_name",), (3, b"x", [])):
        assert refusal(call, arguments).startswith(f"{name} is {value!r}")
    plan = PrunePlan.load(tmp_path / "plan.json")
    native = {
        amct.analyze: {"model": SmallNet(), "inputs": IMAGE},
        amct.prune: {
            "model": SmallNet(), "inputs": IMAGE, "ratio": 0.5, "round_to": 1, "importance": "l2", "skip": (),
            "groups": None, "analysis": None,
        },
        amct.verify: {"model": SmallNet(), "pruned": SmallNet(), "plan": plan, "inputs": IMAGE},
    }  # fmt: skip
    strange = (
        3,
        b"x",
        object(),
        "text",
        [],
        {},
        {"a": "b"},
        {0: object()},
        {"0": [0]},
        {0: [[1], [2, 3]]},
        {True: [0]},
    )
    for name in ("ratio", "importance", "skip", "groups", "analysis", "plan"):
        for call, _, value, arguments in wrong_calls(native, (name,), strange):
            if (name, value) in [("skip", []), ("skip", {}), ("groups", {})]:
                continue
            message = refusal(call, arguments)
            assert name in message, message


def test_data(calls: dict[Any, dict[str, Any]]) -> None:
    """What is no tensor, and tuples of what forward does not take."""
    wrong = (None, 3, "image", b"x", object(), (), (None,), (IMAGE, IMAGE), {"x": IMAGE})
    for call, _, value, arguments in wrong_calls(calls, ("input_data",), wrong):
        if call.__name__.startswith("restore"):
            continue  # structure and weights are all that restore needs
        with pytest.raises((OpenworkError, TypeError)) as caught:
            call(**arguments)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, OpenworkError) or str(caught.value).startswith("input"), (call, value)


@pytest.mark.parametrize("names", [("config_defination", "record_file"), ("model", "input_data"),
                                   ("input_data", "config_defination"), ("model", "config_defination"),
                                   ("record_file", "pth_file")])  # fmt: skip
def test_swapped(calls: dict[Any, dict[str, Any]], names: tuple[str, str], tmp_path: Path) -> None:
    """Two arguments exchanged: a message, and every file as it was."""
    for call, arguments in calls.items():
        if set(names) <= set(arguments):
            files = {path: path.read_bytes() for path in leftovers(tmp_path, set())}
            swapped = {**arguments, names[0]: arguments[names[1]], names[1]: arguments[names[0]]}
            try:
                message = refusal(call, swapped)
            except AssertionError as failure:
                if "raw TypeError: input" not in str(failure):
                    raise
                message = str(failure)
            assert message
            assert {path: path.read_bytes() for path in leftovers(tmp_path, set())} == files
