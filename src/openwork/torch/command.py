"""``openwork analyze``: the table of what can be pruned."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import click

from openwork.errors import ConfigError, ModelError, nearest
from openwork.torch.structure import one_line

__all__ = ["build", "command", "parse_shape"]


def build(target: str) -> Any:
    """Call ``package.module:function``, without pretrained weights where it takes them.

    Raises:
        ConfigError: no such module or function.
        ModelError: it fails, or cannot be called without arguments.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"model is {target!r}; package.module:function is needed, e.g. torchvision.models:resnet18")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"model {target!r}: {module_name!r} cannot be imported: {one_line(error)}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"model {target!r}: {module_name!r} has no {part!r}; {nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"model {target!r} is a {type(found).__name__}; a function or class that builds a model is needed"
        )
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    without = {name: None for name in ("weights", "weights_backbone") if name in parameters}
    try:
        return found(**without)
    except TypeError as error:
        raise ModelError(f"model {target!r} cannot be built without arguments: {error}") from error
    except Exception as error:
        raise ModelError(f"model {target!r} cannot be built: {one_line(error)}") from error


def parse_shape(text: str) -> tuple[int, ...]:
    """``1,3,224,224`` as a tuple.

    Raises:
        ConfigError: anything else.
    """
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--input is {text!r}; comma-separated lengths of at least 1 are needed, e.g. 1,3,224,224")
    return shape


@click.command("analyze", short_help="What can be pruned in a model, and what cannot and why.")
@click.argument("model")
@click.option("--input", "inputs", multiple=True, required=True, metavar="1,3,224,224",
              help="Shape of an input; give it once for each positional argument.")  # fmt: skip
@click.option("--integers", is_flag=True, help="The inputs are integers (token ids).")
def command(model: str, inputs: tuple[str, ...], integers: bool) -> None:
    """Print the groups of channels of MODEL (package.module:function) and what is frozen, with reasons.

    \b
    Example:
      openwork analyze torchvision.models:resnet18 --input 1,3,224,224
    """
    import torch

    from openwork.torch import analyze

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: models in the current folder are found
    shapes = [parse_shape(text) for text in inputs]
    network = build(model)
    tensors = tuple(torch.zeros(shape, dtype=torch.long if integers else torch.float32) for shape in shapes)
    click.echo(str(analyze(network, tensors)))
