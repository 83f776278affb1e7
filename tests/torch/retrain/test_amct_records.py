"""Records as AMCT writes them: layers and operators, without openwork's own attributes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nets.checks import same_state, snapshot
from nets.retrain import (
    ConcatNet,
    DeepNet,
    GroupChain,
    GroupSums,
    LinearNorm,
    SmallNet,
    channels_config,
    create,
    settle_,
    written,
)
from openwork.errors import RecordError
from openwork.record import Record, dump_record
from openwork.torch import restore_prune_retrain_model

IMAGE = torch.randn(2, 3, 16, 16)


def node(
    side: str,
    name: str,
    kind: str,
    begin: int,
    end: int,
    removed: Sequence[int],
    group: int | None = None,
    prune_group: int | None = None,
) -> str:
    """One node in AMCT's order of attributes."""
    lines = [f'attr {{ name: "type" type: STRING s: "{kind}" }}']
    numbers = {"begin": begin, "end": end, "group": group, "prune_group": prune_group}
    lines += [f'attr {{ name: "{n}" type: INT i: {v} }}' for n, v in numbers.items() if v is not None]
    positions = " ".join(f"ints: {position}" for position in removed)
    lines.append(f'attr {{ name: "prune_index" type: INTS {positions} }}')
    return f'  {side} {{\n    name: "{name}"\n    ' + "\n    ".join(lines) + "\n  }\n"


def group(*nodes: str) -> str:
    return "prune_record {\n" + "".join(nodes) + "}\n"


def restore(model: nn.Module, inputs: object, folder: Path, record: str, weights: dict[str, Tensor]) -> nn.Module:
    torch.save(weights, folder / "w.pth")
    config = written(folder, channels_config(0.5), "any.cfg")
    return restore_prune_retrain_model(
        model, inputs, written(folder, record, "amct.txt"), config, str(folder / "w.pth")
    )


def amct_text(record: Record) -> str:
    """A record of openwork without what only openwork reads."""
    for item in record.channels:
        item.producers[0].extra.clear()  # type: ignore[attr-defined]
    text = dump_record(record)
    assert "openwork" not in text
    return text


def test_plain_chain_by_hand(tmp_path: Path) -> None:
    text = group(
        node("producer", "conv1", "Conv", 0, 20, [1, 5, 19]),
        node("consumer", "bn1", "BatchNormalization", 0, 20, [1, 5, 19]),
        node("consumer", "/Relu", "Relu", 0, 20, [1, 5, 19]),
        node("consumer", "conv2", "Conv", 0, 20, [1, 5, 19]),
    ) + group(
        node("producer", "conv3", "Conv", 0, 32, [0, 31]),
        node("consumer", "pool", "GlobalAveragePool", 0, 32, [0, 31]),
        node("consumer", "/Flatten", "Flatten", 0, 32, [0, 31]),
        node("consumer", "fc1", "Gemm", 0, 32, [0, 31]),
    )
    model = settle_(SmallNet())
    state = model.state_dict()
    first, last = [c for c in range(20) if c not in (1, 5, 19)], list(range(1, 31))
    for name in ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"):
        state[name] = state[name][first]
    state["conv2.weight"] = state["conv2.weight"][:, first]
    state["conv3.weight"], state["conv3.bias"] = state["conv3.weight"][last], state["conv3.bias"][last]
    state["fc1.weight"] = state["fc1.weight"][:, last]
    restored = restore(SmallNet(), IMAGE, tmp_path, text, state)
    assert (restored.conv1.out_channels, restored.bn1.num_features, restored.conv2.in_channels) == (17, 17, 17)
    assert (restored.conv3.out_channels, restored.fc1.in_features) == (30, 30)
    assert torch.equal(restored.conv2.weight, state["conv2.weight"])
    assert restored.eval()(IMAGE).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "shape", "ratio", "aligned"),
    [
        (SmallNet, (2, 3, 16, 16), 0.5, False),
        (GroupSums, (1, 16, 28, 28), 0.25, False),
        (GroupChain, (1, 16, 8, 8), 0.5, True),
        (LinearNorm, (4, 16), 0.5, False),
        (DeepNet, (2, 2, 16, 16), 0.5, False),
        (ConcatNet, (1, 3, 8, 8), 0.5, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_equals_what_openwork_made(
    build: type[nn.Module], shape: tuple[int, ...], ratio: float, aligned: bool, tmp_path: Path
) -> None:
    inputs = torch.randn(shape)
    ours, record = create(settle_(build()), inputs, tmp_path, channels_config(ratio, aligned))
    restored = restore(build(), inputs, tmp_path, amct_text(record), ours.state_dict())
    assert repr(restored) == repr(ours)
    assert same_state(snapshot(restored), snapshot(ours))


class Branches(nn.Module):
    """Sum in l1, concatenation, depthwise with multiplier 2, grouped reader, flatten into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Module()
        self.l1.a, self.l1.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.c = nn.Conv2d(3, 12, 3, padding=1)
        self.act = nn.ReLU()
        self.bn = nn.BatchNorm2d(20)
        self.mix = nn.Conv2d(20, 16, 1)
        self.deep = nn.Conv2d(16, 32, 3, groups=16, padding=1)
        self.deepnorm = nn.BatchNorm2d(32)
        self.grouped = nn.Conv2d(32, 10, 1, groups=2)
        self.left, self.right = nn.Conv2d(10, 6, 1), nn.Conv2d(10, 4, 1)
        self.fc = nn.Linear(160, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.act(self.l1.a(x) + self.l1.b(x)), self.c(x)], 1)
        y = self.grouped(self.deepnorm(self.deep(self.mix(self.bn(y)))))
        y = torch.cat([self.left(y), self.right(y)], 1)
        return self.fc(nn.functional.adaptive_avg_pool2d(y, 4).flatten(1))


def test_branches_by_hand(tmp_path: Path) -> None:
    inputs = torch.randn(2, 3, 8, 8)
    text = (
        group(
            node("producer", "l1.a", "Conv", 0, 8, [2, 3]),
            node("producer", "l1.b", "Conv", 0, 8, [2, 3]),
            node("consumer", "/l1/Add", "Add", 0, 8, [2, 3]),
            node("consumer", "act", "Relu", 0, 8, [2, 3]),
            node("consumer", "/Concat", "Concat", 0, 8, [2, 3]),
            node("consumer", "bn", "BatchNormalization", 0, 8, [2, 3]),
            node("consumer", "mix", "Conv", 0, 8, [2, 3]),
        )
        + group(
            node("producer", "c", "Conv", 0, 12, [0, 11]),
            node("consumer", "/Concat", "Concat", 8, 20, [8, 19]),
            node("consumer", "bn", "BatchNormalization", 8, 20, [8, 19]),
            node("consumer", "mix", "Conv", 8, 20, [8, 19]),
        )
        + group(
            node("producer", "mix", "Conv", 0, 16, [1, 4, 9, 12], prune_group=2),
            node("consumer", "deep", "Conv", 0, 16, [1, 4, 9, 12]),
            node("consumer", "deepnorm", "BatchNormalization", 0, 16, [1, 4, 9, 12]),
            node("consumer", "grouped", "Conv", 0, 32, [2, 3, 8, 9, 18, 19, 24, 25], group=2),
        )
        + group(
            node("producer", "left", "Conv", 0, 6, [5]),
            node("consumer", "/Concat_1", "Concat", 0, 6, [5]),
            node("consumer", "fc", "Gemm", 0, 6, [5]),
        )
        + group(
            node("producer", "right", "Conv", 0, 4, [0]),
            node("consumer", "/Concat_1", "Concat", 6, 10, [6]),
            node("consumer", "fc", "Gemm", 6, 10, [6]),
        )
    )
    model = settle_(Branches()).eval()
    # The masked original: whatever reads a removed channel has zeros there.
    masked = settle_(Branches()).eval()
    masked.load_state_dict(model.state_dict())
    twice = [2, 3, 8, 9, 18, 19, 24, 25]
    with torch.no_grad():
        masked.mix.weight[:, [2, 3, 8, 19]] = 0
        for position in twice:
            masked.grouped.weight[position // 16 * 5 : (position // 16 + 1) * 5, position % 16] = 0
        masked.fc.weight.view(10, 10, 16)[:, [5, 6]] = 0
        expected = masked(inputs)
    kept = {size: [c for c in range(size) if c not in gone] for size, gone in {
        8: (2, 3), 12: (0, 11), 20: (2, 3, 8, 19), 16: (1, 4, 9, 12), 32: twice, 6: (5,), 4: (0,)}.items()}  # fmt: skip
    state = model.state_dict()
    for name, size in {"l1.a": 8, "l1.b": 8, "c": 12, "bn": 20, "mix": 16, "deep": 32, "deepnorm": 32, "left": 6,
                       "right": 4}.items():  # fmt: skip
        for part in ("weight", "bias", "running_mean", "running_var"):
            if f"{name}.{part}" in state:
                state[f"{name}.{part}"] = state[f"{name}.{part}"][kept[size]]
    state["mix.weight"] = state["mix.weight"][:, kept[20]]
    rows = state["grouped.weight"]
    inner = [[c - 16 * half for c in kept[32] if c // 16 == half] for half in (0, 1)]
    state["grouped.weight"] = torch.cat([rows[:5][:, inner[0]], rows[5:][:, inner[1]]])
    fc = state["fc.weight"].view(10, 10, 16)
    state["fc.weight"] = fc[:, [c for c in range(10) if c not in (5, 6)]].reshape(10, -1)
    restored = restore(Branches(), inputs, tmp_path, text, state)
    assert (restored.deep.groups, restored.deep.in_channels, restored.deep.out_channels) == (12, 12, 24)
    assert (restored.grouped.in_channels, restored.fc.in_features) == (24, 128)
    with torch.no_grad():
        torch.testing.assert_close(restored.eval()(inputs), expected, rtol=1e-4, atol=1e-5)


CONV1 = node("producer", "conv1", "Conv", 0, 20, [1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (group(node("producer", "covn1", "Conv", 0, 20, [1])), ["'covn1'", "not in the model", "'conv1'"]),
        (group(node("producer", "conv1", "Conv", 0, 64, [60])), ["'conv1'", "20 channels", "64", "another model"]),
        (group(CONV1, node("consumer", "fc2", "Gemm", 0, 96, [95])), ["'fc2'", "48 channels", "96"]),
        (group(node("producer", "/Add", "Add", 0, 20, [1])), ["none of its layers"]),
        (group(node("producer", "conv1", "Conv", 0, 20, [20])), ["'conv1'", "20", "0 to 19"]),
        (group(node("producer", "conv1", "Conv", 0, 20, [-1])), ["'conv1'", "-1"]),
        (group(node("producer", "conv1", "Conv", 0, 20, [3, 3])), ["'conv1'", "3 twice"]),
        (group(node("producer", "conv1", "Conv", 0, 20, range(20))), ["'conv1'", "at least one must stay"]),
        (group(CONV1)[:-30], ["amct.txt"]),
        ("", ["empty"]),
        ("not a record", ["amct.txt"]),
    ],
)
def test_damaged_or_of_another_model(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        restore(SmallNet(), IMAGE, tmp_path, text, SmallNet().state_dict())
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_layer_that_amct_does_not_know(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
    text = group(
        node("producer", "0", "Conv", 0, 8, [1]),
        node("consumer", "1", "BatchNormalization", 0, 8, [1]),
        node("consumer", "2", "Conv", 0, 8, [1]),
    )
    with pytest.raises(RecordError, match="'1' is a GroupNorm"):
        restore(net, IMAGE, tmp_path, text, net.state_dict())
