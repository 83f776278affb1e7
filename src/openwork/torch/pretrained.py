"""The sizes in the configuration of a transformer of Hugging Face's transformers.

``save_pretrained`` writes the weights and the configuration, ``from_pretrained`` builds the model again from the
configuration alone. So a plan also states the configuration's new values, if there are any from which the class builds
exactly the pruned model: the same shapes, the same constants, and a forward of the predicted sizes and numbers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from openwork.errors import ModelError, OpenworkError
from openwork.graph.groups import IntArray
from openwork.graph.plan import Cut, GroupCut, Repair
from openwork.torch.analysis import Analysis
from openwork.torch.prediction import Prediction
from openwork.torch.replay import replay
from openwork.torch.structure import all_modules, all_tensors
from openwork.torch.surgery import cut_tensor, set_attribute
from openwork.torch.trace import on_shapes

__all__ = ["config_repairs"]

_LOG = logging.getLogger("openwork")
_MODEL = ("transformers.modeling_utils", "PreTrainedModel")  # told by name: transformers need not be there
_CONFIG = "transformers.configuration_utils"
_MOST_TRIALS = 300
_LARGE = 1 << 16  # elements: larger tensors hold weights, which no trial needs


def config_repairs(
    analysis: Analysis, removed: Mapping[int, IntArray], cuts: Iterable[GroupCut], repairs: Iterable[Repair]
) -> list[Repair]:
    """New values in the configuration of each transformer that the model is or holds.

    Where there are none, a warning says so and the configuration stays as it is.

    Args:
        analysis: the analysis of the unpruned model.
        removed: the units that go, by group.
        cuts, repairs: the plan without these values.
    """
    found: list[Repair] = []
    cuts, repairs = tuple(cuts), tuple(repairs)
    by_config: dict[int, list[_Search]] = {}
    for path, module in _pretrained(analysis.model).items():
        search = _Search(analysis, path, module, removed, cuts, repairs)
        by_config.setdefault(id(search.config), []).append(search)
    for searches in by_config.values():
        if not any(search.shrinks for search in searches):
            continue
        each = [search.run() if search.shrinks else [] for search in searches]
        if any(_values(values) != _values(each[0]) for values in each):
            searches[0].warn("it is shared by several models, which now need different ones")
        else:
            found += [repair for values in each for repair in values]
    return found


def _values(repairs: Iterable[Repair]) -> list[tuple[str, Any]]:
    return [(repair.attribute, repair.new) for repair in repairs]


def _pretrained(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost transformers in a model, by path."""
    found: dict[str, nn.Module] = {}
    kinds: dict[type, bool] = {}
    for path, module in all_modules(model).items():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = any((base.__module__, base.__name__) == _MODEL for base in kind.__mro__)
        if kinds[kind] and not any(not outer or path.startswith(outer + ".") for outer in found):
            found[path] = module
    return found


@dataclass(frozen=True)
class _Leaf:
    """One number in a configuration: attribute names from the outermost inwards, and a place in a list, or -1."""

    names: tuple[str, ...]
    place: int = -1

    def _owner(self, config: Any) -> Any:
        for name in self.names[:-1]:
            config = getattr(config, name)
        return config

    def get(self, config: Any) -> int:
        value = getattr(self._owner(config), self.names[-1])
        return int(value if self.place < 0 else value[self.place])

    def set(self, config: Any, value: int) -> None:
        owner, name = self._owner(config), self.names[-1]
        if self.place >= 0:
            items = getattr(owner, name)
            value = type(items)(value if i == self.place else item for i, item in enumerate(items))  # type: ignore[assignment]
        setattr(owner, name, value)


def _leaves(config: Any, names: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    base = next((kind for kind in reversed(type(config).__mro__) if kind.__module__ == _CONFIG), None)
    for name, value in vars(config).items():
        inside = (*names, name)
        if name.startswith("_"):
            continue
        if _is_size(value):
            yield _Leaf(inside)
        elif isinstance(value, (list, tuple)) and value and all(_is_size(item) for item in value):
            yield from (_Leaf(inside, place) for place in range(len(value)))
        elif base is not None and isinstance(value, base):
            yield from _leaves(value, inside)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _WeightsOnMeta(TorchDispatchMode):
    """Large tensors are made on the meta device; small ones, which may be constants of the model, are real."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        names = [argument.name for argument in func._schema.arguments]
        if "device" in names and names[0] in ("size", "n") and args:
            sizes = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            elements = 1
            for size in sizes:
                elements *= int(size)
            if elements > _LARGE:
                kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _built(kind: type, config: Any) -> nn.Module | None:
    """A new model of a class, or None where the class refuses the configuration."""
    try:
        with _quiet(), torch.random.fork_rng(devices=[]), _WeightsOnMeta():
            made = kind(config)
    except (Exception, SystemExit):  # whatever a model's own code raises for sizes that do not go together
        return None
    return made.eval() if isinstance(made, nn.Module) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library logs, and models print, of configurations that are tried."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


Choice = tuple[int, ...]
_RIGHT = 0, 0


class _Search:
    """Looks for values of one configuration from which the pruned model is built.

    A choice of values is judged by the number of tensors of other shapes, then by the number of operators of the new
    model's forward that differ from the prediction.
    """

    def __init__(
        self,
        analysis: Analysis,
        path: str,
        module: nn.Module,
        removed: Mapping[int, IntArray],
        cuts: tuple[GroupCut, ...],
        repairs: tuple[Repair, ...],
    ) -> None:
        self.analysis = analysis
        self.path, self.module = path, module
        self.repairs = repairs
        self.groups = cuts
        self.prediction = Prediction(analysis.trace, analysis.settled.dead_labels(dict(removed)))
        self.cuts: dict[str, list[Cut]] = {}
        for group in cuts:
            for cut in group.cuts:
                self.cuts.setdefault(cut.parameter, []).append(cut)
        first = {id(tensor): name for name, tensor in reversed(all_tensors(analysis.model).items())}
        inside = all_tensors(module, duplicates=True)
        unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()
        self.kept = {
            name for name in module.state_dict(keep_vars=True) if not any(re.search(key, name) for key in unsaved)
        }
        self.old = {name: tuple(tensor.shape) for name, tensor in inside.items() if name in self.kept}
        self.new = {name: self._after(first.get(id(inside[name]), ""), shape) for name, shape in self.old.items()}
        self.tensors = inside
        self.leaves = list(_leaves(self.config))
        self.values = tuple(leaf.get(self.config) for leaf in self.leaves)
        self._checks = False  # whether the configuration can be made again from its own values
        self._known: dict[Choice, tuple[int, int]] = {}

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def shrinks(self) -> bool:
        return self.old != self.new

    def _after(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        lengths = list(shape)
        for cut in self.cuts.get(name, ()):
            lengths[cut.axis] -= len(cut.removed) // cut.blocks
        return tuple(lengths)

    def run(self) -> list[Repair]:
        """The new values; none, with a warning, where the class builds no such model."""
        original = _built(type(self.module), copy.deepcopy(self.config))
        if original is None or self._differing(original, self.old):
            self.warn("the class does not build the unpruned model from it either")
            return []
        self._constants = self._kept_constants(original)
        with contextlib.suppress(Exception), _quiet():
            type(self.config).from_dict(self.config.to_dict())
            self._checks = True
        choice = self._chosen()
        if choice is None:
            return []
        result = self._as_repairs(choice)
        if self._forward_differs(None, result):
            self.warn("the forward of the pruned model reads it")
            return []
        return result

    def warn(self, why: str) -> None:
        kind = type(self.module).__name__
        _LOG.warning(
            "the config of %s keeps its old sizes (%s): what save_pretrained writes will not load with "
            "from_pretrained; keep the plan and the state dict instead",
            kind if not self.path else f"{kind} {self.path}",
            why,
        )

    def _chosen(self) -> Choice | None:
        """Values that give exactly the pruned model, as few new ones as possible."""
        options = self._options()
        all_new = tuple(news[0] if news else value for value, news in zip(self.values, options, strict=True))
        best: tuple[tuple[int, int], Choice] | None = None
        for offered in (options, self._wider(options)):
            for start in (all_new, self.values):
                found = self._descended(start, offered)
                best = found if best is None else min(best, found)
                if best[0] == _RIGHT:
                    choice = self._without_chance(best[1])
                    if len(self._known) < _MOST_TRIALS:
                        return choice
                    self.warn(f"{_MOST_TRIALS} trials did not tell which of its numbers are sizes")
                    return None
        assert best is not None
        self.warn(self._why(best[1]))
        return None

    def _descended(self, start: Choice, options: list[tuple[int, ...]]) -> tuple[tuple[int, int], Choice]:
        """The best choice that changes of one value at a time lead to."""
        best, before = (self._score(start), start), None
        while best[0] != before and best[0] != _RIGHT:
            before = best[0]
            for index, news in enumerate(options):
                for value in (self.values[index], *news):
                    trial = (*best[1][:index], value, *best[1][index + 1 :])
                    best = min(best, (self._score(trial), trial))
        return best

    def _without_chance(self, choice: Choice) -> Choice:
        """The choice without new values of numbers that were equal to a length by chance: of whole lists, of single
        numbers, of two equal ones that must stay equal."""
        changed = [index for index, value in enumerate(self.values) if choice[index] != value]
        lists: dict[tuple[str, ...], list[int]] = {}
        for index in changed:
            lists.setdefault(self.leaves[index].names, []).append(index)
        pairs = [[i, j] for i in changed for j in changed if i < j and self.values[i] == self.values[j]]
        for together in (*lists.values(), *([index] for index in changed), *pairs):
            trial = tuple(self.values[i] if i in together else value for i, value in enumerate(choice))
            if trial != choice and self._score(trial) == _RIGHT:
                choice = trial
        return choice

    def _why(self, choice: Choice) -> str:
        """What is wrong with the best choice."""
        made = self._made(choice)
        if made is None:
            return "no values give the new sizes"
        shapes = _shapes(made)
        for name, shape in self.new.items():
            if shapes.get(name) != shape:
                return f"no values give {name} the shape {list(shape)}"
        for name in self._other_constants(made):
            return f"the class computes {name} from it, which would be another than now"
        return "the model that the class builds computes something else"

    def _changes(self) -> Counter[tuple[int, int]]:
        changes: Counter[tuple[int, int]] = Counter()
        for name, shape in self.old.items():
            changes.update((was, now) for was, now in zip(shape, self.new[name], strict=True) if was != now)
        for group in self.groups:
            changes[group.units_before, group.units_after] += 1
        for repair in self.repairs:
            changes.update(_numbers(repair.old, repair.new))
        return changes

    def _options(self) -> list[tuple[int, ...]]:
        """New values for each number: what lengths that were equal to it have become, the most frequent first."""
        changes = self._changes().most_common()
        return [tuple(new for (old, new), _ in changes if old == value) for value in self.values]

    def _wider(self, options: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Also numbers of parts of constant length: of heads, of groups."""
        changes = sorted({(old, new) for old, new in self._changes() if new and old > new})
        return [
            tuple(
                dict.fromkeys(
                    (
                        *news,
                        *(
                            new // (old // value)
                            for old, new in changes
                            if value < old and old % value == 0 and new % (old // value) == 0
                        ),
                    )
                )
            )
            for value, news in zip(self.values, options, strict=True)
        ]

    def _made(self, choice: Choice) -> nn.Module | None:
        config = copy.deepcopy(self.config)
        try:
            for leaf, value in zip(self.leaves, choice, strict=True):
                if leaf.get(config) != value:
                    leaf.set(config, value)
            if self._checks:
                type(config).from_dict(config.to_dict())
        except Exception:  # configurations check their values
            return None
        return _built(type(self.module), config)

    def _score(self, choice: Choice) -> tuple[int, int]:
        known = self._known.get(choice)
        if known is None:
            made = self._made(choice) if len(self._known) < _MOST_TRIALS else None
            if made is None:
                known = len(self.old) + 1, 0
            else:
                shapes = self._differing(made, self.new) + len(self._other_constants(made))
                known = shapes, 0 if shapes else self._forward_differs(made, ())
            self._known[choice] = known
        return known

    def _differing(self, made: nn.Module, wanted: Mapping[str, tuple[int, ...]]) -> int:
        shapes = _shapes(made)
        extra = set(made.state_dict(keep_vars=True)) - set(self.tensors)
        return sum(shapes.get(name) != shape for name, shape in wanted.items()) + len(extra)

    def _kept_constants(self, original: nn.Module) -> dict[str, Any]:
        """What the class computes from the configuration and does not save, cut as the plan says; None for what is
        cut and not there to be compared."""
        inside = f"{self.path}." if self.path else ""
        found: dict[str, Any] = {}
        for name, value in _constants(original).items():
            cuts = self.cuts.get(inside + name, [])
            if name not in self.old:
                found[name] = cut_tensor(value, cuts) if cuts else value
                if cuts and value.is_meta:
                    found[name] = None
        return found

    def _other_constants(self, made: nn.Module) -> list[str]:
        given = _constants(made)
        return [name for name, wanted in self._constants.items() if not _same(given.get(name), wanted)]

    def _forward_differs(self, made: nn.Module | None, config: Iterable[Repair]) -> int:
        """Operators that differ from the prediction in the forward of the cut model, or with `made` in its place."""
        whole = self.analysis.model
        change: Callable[[str, torch.Tensor], torch.Tensor] = self._cut
        repairs = [*self.repairs, *config]
        if made is not None:
            self._fill(made)
            if self.path:
                return self._inside(made, repairs)
            whole, change, repairs = made, _whole, []
        with on_shapes(whole, self.analysis.inputs, self.analysis.trace.mode, change) as (twin, given):
            twin.eval()
            for repair in repairs:
                set_attribute(twin, repair)
            return _differences(twin, given, self.prediction)

    def _inside(self, made: nn.Module, repairs: list[Repair]) -> int:
        mode, inputs = self.analysis.trace.mode, self.analysis.inputs
        pair = nn.ModuleList([self.analysis.model, made])

        def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
            which, _, rest = name.partition(".")
            return self._cut(rest, tensor) if which == "0" else _whole(rest, tensor)

        with on_shapes(pair, inputs, mode, change) as (twins, given):
            twin, part = twins.eval().children()
            for repair in repairs:
                set_attribute(twin, repair)
            owner, _, name = self.path.rpartition(".")
            setattr(twin.get_submodule(owner), name, part)
            return _differences(twin, given, self.prediction)

    def _cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return cut_tensor(tensor, self.cuts.get(name, []))

    def _fill(self, made: nn.Module) -> None:
        """Put tensors without memory, of the model's own types and devices, in the place of those on meta."""
        for module_path, module in all_modules(made).items():
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for table in tables:
                for name, tensor in list(table.items()):
                    own = self.tensors.get(f"{module_path}.{name}" if module_path else name)
                    if tensor is None or own is None or (tensor.device == own.device and tensor.dtype == own.dtype):
                        continue
                    if tensor.is_meta:
                        empty = torch.zeros(1, dtype=own.dtype, device=own.device).expand(tensor.shape)
                    else:
                        empty = tensor.detach().to(own.device, own.dtype)
                    table[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty

    def _as_repairs(self, choice: Choice) -> list[Repair]:
        changed = copy.deepcopy(self.config)
        names: dict[tuple[str, ...], None] = {}
        for leaf, value, old in zip(self.leaves, choice, self.values, strict=True):
            if value != old:
                leaf.set(changed, value)
                names[leaf.names] = None
        return [
            Repair(self.path, ".".join(("config", *path)), _plain(self.config, path), _plain(changed, path))
            for path in names
        ]


def _plain(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return list(config) if isinstance(config, tuple) else config


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in all_tensors(model, duplicates=True).items()}


def _constants(model: nn.Module) -> dict[str, Any]:
    """All tensors of a model by name, and the tensors and arrays that are plain attributes of its modules."""
    found: dict[str, Any] = dict(all_tensors(model, duplicates=True))
    for path, module in all_modules(model).items():
        for name, value in vars(module).items():
            if isinstance(value, (torch.Tensor, np.ndarray)):
                found[f"{path}.{name}" if path else name] = torch.as_tensor(value)
    return found


def _same(made: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if made is None or wanted is None or made.shape != wanted.shape:
        return False
    # Without values: a large table of which nothing is cut, such as a mask of positions.
    return made.is_meta or wanted.is_meta or torch.equal(made, wanted)


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor that has none, laid out as a weight."""
    if tensor.numel() > 1 and not any(tensor.stride()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _numbers(old: Any, new: Any) -> Iterator[tuple[int, int]]:
    if _is_size(old) and _is_size(new) and old != new:
        yield old, new
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        for was, now in zip(old, new):
            yield from _numbers(was, now)


def _differences(twin: nn.Module, given: Any, prediction: Prediction) -> int:
    try:
        return len(replay(twin, given, prediction))
    except (ModelError, OpenworkError):
        return 1
