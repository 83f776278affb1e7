"""Models that must simply work, whatever they are made of."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nets.checks import difference, same_state, snapshot
from nets.retrain import SmallNet, channels_config, create, node_of, settle_
from openwork.errors import ModelError, UnsupportedModelError
from openwork.record import load_record
from openwork.torch import prune, restore_prune_retrain_model, verify
from openwork.torch.retrain.records import plan_from_record

IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
HALF = channels_config(0.5)


def round_trip(build: Any, inputs: Any, folder: Path, text: str = HALF) -> tuple[nn.Module, nn.Module]:
    """Create, save weights, restore: exactly the same model. Returns the given and the pruned model."""
    model = build()
    pruned, _ = create(model, inputs, folder, text)
    torch.save(pruned.state_dict(), folder / "w.pth")
    restored = restore_prune_retrain_model(
        build(), inputs, folder / "record.txt", folder / "prune.cfg", folder / "w.pth"
    )
    assert repr(restored) == repr(pruned)
    assert same_state(snapshot(restored), snapshot(pruned))
    return model, pruned


def equivalent(model: nn.Module, pruned: nn.Module, inputs: Any, folder: Path, tolerance: float = 1e-5) -> None:
    plan = plan_from_record(load_record(folder / "record.txt"), model)
    assert verify(model, pruned, plan, inputs) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = IMAGE.to(dtype)
    model, pruned = round_trip(lambda: settle_(SmallNet()).to(dtype), inputs, tmp_path)
    assert {tensor.dtype for tensor in pruned.parameters()} == {dtype}
    assert (pruned.conv1.out_channels, pruned.fc1.out_features) == (10, 24)
    equivalent(model, pruned, inputs, tmp_path, tolerance=1e-5 if dtype is torch.float64 else 0.05)


def test_mixed_precision_parts(tmp_path: Path) -> None:
    class Mixed(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.fc1.half(), self.fc2.half()

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x)))))).flatten(1)
            return self.fc2(self.fc1(x.half()))

    _, pruned = round_trip(Mixed, IMAGE, tmp_path)
    assert (pruned.conv1.weight.dtype, pruned.fc1.weight.dtype) == (torch.float32, torch.float16)


class TwoDevices(nn.Module):
    """The second half is on another device, and forward moves the data there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 12, 3, padding=1).to("meta")
        self.last = nn.Conv2d(12, 4, 1).to("meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).to(self.second.weight.device)))


def test_layers_on_two_devices(tmp_path: Path) -> None:
    """Without an accelerator the meta device stands for one; what is there has no values to be ranked by."""
    pruned, plan = prune(TwoDevices(), IMAGE, ratio=0.5, importance="random")
    assert (pruned.first.weight.device.type, pruned.first.weight.shape[0]) == ("cpu", 8)
    assert (pruned.second.weight.device.type, tuple(pruned.second.weight.shape)) == ("meta", (6, 8, 3, 3))
    assert tuple(pruned.last.weight.shape) == (4, 6, 1, 1)
    assert plan.apply(TwoDevices()).second.weight.shape == pruned.second.weight.shape
    with pytest.raises(ModelError, match=r"'second.weight' is on the meta device"):
        create(TwoDevices(), IMAGE, tmp_path, HALF)


def test_data_parallel_wrapper(tmp_path: Path) -> None:
    model = settle_(SmallNet())
    pruned, _ = create(nn.DataParallel(model), IMAGE, tmp_path, HALF)
    plain, _ = create(model, IMAGE, tmp_path, HALF)
    assert type(pruned) is SmallNet
    assert same_state(snapshot(pruned), snapshot(plain))
    wrapped = nn.DataParallel(pruned)
    torch.save(wrapped.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        nn.DataParallel(SmallNet()), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    assert same_state(snapshot(restored), snapshot(plain))


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_distributed_wrapper(tmp_path: Path) -> None:
    model = settle_(SmallNet())
    wrapper = nn.parallel.DistributedDataParallel(model)
    pruned, _ = create(wrapper, IMAGE, tmp_path, HALF)
    again = nn.parallel.DistributedDataParallel(pruned)
    again(IMAGE).sum().backward()
    assert pruned.conv1.weight.grad.shape == (10, 3, 3, 3)
    torch.save(again.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        SmallNet(), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    assert same_state(snapshot(restored), snapshot(pruned))


def test_compiled_model(tmp_path: Path) -> None:
    model = settle_(SmallNet())
    pruned, _ = create(torch.compile(model, backend="eager"), IMAGE, tmp_path, HALF)
    plain, _ = create(model, IMAGE, tmp_path, HALF)
    assert type(pruned) is SmallNet
    assert same_state(snapshot(pruned), snapshot(plain))
    inside = nn.DataParallel(torch.compile(model, backend="eager"))
    pruned, _ = create(torch.compile(inside, backend="eager"), IMAGE, tmp_path, HALF)
    assert same_state(snapshot(pruned), snapshot(plain))


def test_model_compiled_in_place(tmp_path: Path) -> None:
    model = settle_(SmallNet())
    model.compile(backend="eager")
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert pruned(IMAGE).shape == (2, 10)


@dataclasses.dataclass
class Answer:
    scores: Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    scores: Tensor
    note: str


RESULTS = {
    "dict": lambda y: {"scores": y, "none": None},
    "tuple": lambda y: (y, (y.mean(), 3)),
    "list": lambda y: [y, "text"],
    "dataclass": lambda y: Answer(y, {"mean": [y.mean()]}),
    "namedtuple": lambda y: Pair(y, "note"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_any_kind(kind: str, tmp_path: Path) -> None:
    class Nested(SmallNet):
        def forward(self, x: Tensor) -> Any:
            return RESULTS[kind](super().forward(x))

    model, pruned = round_trip(lambda: settle_(Nested()), IMAGE, tmp_path)
    # What the caller sees keeps its ten scores.
    assert [pruned.conv1.out_channels, pruned.fc1.out_features, pruned.fc2.out_features] == [10, 24, 10]
    equivalent(model.eval(), pruned, IMAGE, tmp_path)


def test_two_models_in_two_threads(tmp_path: Path) -> None:
    """Each gets the same as alone, many times over."""
    texts = [channels_config(0.5), channels_config(0.25, aligned=True)]
    models = [settle_(SmallNet()), settle_(SmallNet())]
    alone = []
    for index, (model, text) in enumerate(zip(models, texts)):
        (tmp_path / f"alone{index}").mkdir()
        alone.append(snapshot(create(model, IMAGE, tmp_path / f"alone{index}", text)[0]))
    failures: list[BaseException] = []

    def work(index: int) -> None:
        folder = tmp_path / f"thread{index}"
        folder.mkdir()
        try:
            for _ in range(5):
                pruned, _ = create(models[index], IMAGE, folder, texts[index])
                assert same_state(snapshot(pruned), alone[index])
                torch.save(pruned.state_dict(), folder / "w.pth")
                restored = restore_prune_retrain_model(
                    SmallNet(), IMAGE, folder / "record.txt", folder / "prune.cfg", folder / "w.pth"
                )
                assert same_state(snapshot(restored), alone[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for index in range(2):
        left, right = (tmp_path / f"{kind}{index}" / "record.txt" for kind in ("alone", "thread"))
        assert left.read_bytes() == right.read_bytes()


def test_buffers_of_channels(tmp_path: Path) -> None:
    class Scaled(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 2, 20).reshape(1, 20, 1, 1))
            self.register_buffer("shift", torch.linspace(-1, 1, 20).reshape(20, 1, 1), persistent=False)
            self.register_buffer("steps", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.bn1(self.conv1(x)) * self.scale + self.shift)
            x = self.pool(self.conv3(self.bn2(self.conv2(x)))).flatten(1)
            return self.fc2(self.fc1(x))

    model, pruned = round_trip(lambda: settle_(Scaled()).eval(), IMAGE, tmp_path)
    gone = node_of(load_record(tmp_path / "record.txt"), "conv1").prune_index
    kept = [c for c in range(20) if c not in gone]
    assert torch.equal(pruned.scale, model.scale[:, kept])
    assert torch.equal(pruned.shift, model.shift[kept])
    assert pruned.steps == 3
    equivalent(model, pruned, IMAGE, tmp_path)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class TiedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(11, 16), nn.Linear(16, 32), nn.Linear(32, 16)
            self.out = nn.Linear(16, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.down(torch.relu(self.up(self.embed(x)))))

    tokens = torch.randint(11, (2, 5))
    model, pruned = round_trip(TiedNet, tokens, tmp_path)
    assert pruned.out.weight is pruned.embed.weight
    assert pruned.up.out_features == 16
    equivalent(model, pruned, tokens, tmp_path)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
    ],
    ids=["weight_norm", "spectral_norm", "old_weight_norm", "old_spectral_norm"],
)
def test_reparametrised_weights(wrap: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = settle_(SmallNet())
        model.conv2 = wrap(model.conv2)
        return model.eval()

    torch.manual_seed(0)
    model = build()
    before = snapshot(model)
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert same_state(before, snapshot(model))
    assert pruned.fc1.out_features == 24
    assert pruned.conv2.in_channels == pruned.conv1.out_channels == 10
    assert pruned.conv2.out_channels == pruned.conv3.in_channels == 12
    assert pruned.eval()(IMAGE).shape == (2, 10)
    equivalent(model, pruned, IMAGE, tmp_path, tolerance=1e-4)
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        build(), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    with torch.no_grad():
        assert difference(restored.eval()(IMAGE), pruned.eval()(IMAGE)) <= 1e-6


def test_channels_last_stays(tmp_path: Path) -> None:
    _, pruned = round_trip(lambda: SmallNet().to(memory_format=torch.channels_last), IMAGE, tmp_path)
    for weight in (pruned.conv1.weight, pruned.conv2.weight, pruned.conv3.weight):
        assert weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_are_not_contiguous(tmp_path: Path) -> None:
    torch.manual_seed(6)
    plain = settle_(SmallNet())
    expected, _ = create(plain, IMAGE, tmp_path, HALF)
    model = settle_(SmallNet())
    model.load_state_dict(plain.state_dict())
    model.conv1.weight = nn.Parameter(plain.conv1.weight.detach().transpose(0, 3).contiguous().transpose(0, 3))
    model.fc1.weight = nn.Parameter(plain.fc1.weight.detach().t().contiguous().t())
    assert not model.fc1.weight.is_contiguous()
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert same_state(snapshot(pruned), snapshot(expected))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_called_without_gradients(context: Any, tmp_path: Path) -> None:
    model = settle_(SmallNet())
    expected, _ = create(model, IMAGE, tmp_path, HALF)
    with context():
        pruned, _ = create(model, IMAGE, tmp_path, HALF)
        torch.save(pruned.state_dict(), tmp_path / "w.pth")
        restored = restore_prune_retrain_model(
            SmallNet(), IMAGE, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
        )
    for result in (pruned, restored):
        assert same_state(snapshot(result), snapshot(expected))
        result(IMAGE).sum().backward()  # it can be trained
        assert result.conv1.weight.grad is not None


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = SmallNet()
    model.conv1.requires_grad_(False)
    model.fc2.weight.requires_grad_(False)
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert {name: p.requires_grad for name, p in pruned.named_parameters()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }
    pruned(IMAGE).sum().backward()
    assert pruned.conv1.weight.grad is None
    assert pruned.conv2.weight.grad is not None


def test_hooks_of_the_user_stay(tmp_path: Path) -> None:
    model, calls = SmallNet(), []

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(tuple(output.shape))
        return output * 2

    model.conv2.register_forward_hook(double)
    model.fc1.register_full_backward_hook(lambda module, given, made: None)
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert len(model.conv2._forward_hooks) == len(pruned.conv2._forward_hooks) == 1
    equivalent(model.eval(), pruned, IMAGE, tmp_path)
    calls.clear()
    pruned(IMAGE).sum().backward()
    assert calls == [(2, 12, 16, 16)]


def test_modules_without_parameters(tmp_path: Path) -> None:
    class Odd(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.never = nn.Identity(), nn.Conv2d(7, 9, 1)
            self.empty, self.none = nn.ModuleList(), None
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.nothing(super().forward(self.drop(x)))

    _, pruned = round_trip(Odd, IMAGE, tmp_path)
    assert pruned.conv1.out_channels == 10
    assert pruned.never.weight.shape == (9, 7, 1, 1)


class Shared:
    """Something that a model points at."""


def test_attributes_of_any_kind(tmp_path: Path) -> None:
    class Loaded(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.rate: Any = lambda step: step * 0.1
            self.notes, self.thing, self.kind = {"a": [1, 2]}, Shared(), torch.float32
            self.random = torch.Generator()
            self.cached = torch.ones(3, requires_grad=True) * 2  # not a leaf

    model = Loaded()
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert pruned.rate(10) == 1.0
    assert pruned.notes == {"a": [1, 2]}
    assert pruned.notes is not model.notes
    assert torch.equal(pruned.cached, model.cached)


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_copy_gets_locks_of_its_own(make: Any, tmp_path: Path) -> None:
    class Locked(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.lock = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                return super().forward(x)

    model = Locked()
    pruned, _ = create(model, IMAGE, tmp_path, HALF)
    assert pruned.lock is not model.lock
    with model.lock:
        pruned(torch.randn(2, *IMAGE.shape[1:]))


@pytest.mark.parametrize("kind", ["generator", "file"])
def test_attributes_that_cannot_be_copied(kind: str, tmp_path: Path) -> None:
    class Locked(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.pool.held = {"generator": lambda: (i for i in range(3)),
                              "file": lambda: open(__file__)}[kind]()  # fmt: skip # noqa: SIM115

    model = Locked()
    with pytest.raises(UnsupportedModelError, match=r"Locked \(attribute pool\.held\) cannot be copied"):
        create(model, IMAGE, tmp_path, HALF)
    assert not (tmp_path / "record.txt").exists()
    if kind == "file":
        model.pool.held.close()


def test_module_called_several_times(tmp_path: Path) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.same, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = torch.relu(self.same(x))
            return self.last(x)

    model, pruned = round_trip(Again, IMAGE, tmp_path)
    assert tuple(pruned.same.weight.shape) == (8, 8, 1, 1)
    equivalent(model, pruned, IMAGE, tmp_path)


def test_forward_that_looks_at_values(tmp_path: Path) -> None:
    """Such a model cannot run on shapes alone; a real copy is run."""

    class Choosing(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max().item() > 1e6:
                x = x / 1e6
            return super().forward(x)

    model, pruned = round_trip(lambda: settle_(Choosing()).eval(), IMAGE, tmp_path)
    assert pruned.conv1.out_channels == 10
    equivalent(model, pruned, IMAGE, tmp_path)
