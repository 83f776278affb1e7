"""Export to ONNX: whole files, checked, or none."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openwork.errors import ConfigError, FileError, ModelError
from openwork.files import check_writable, path_text
from openwork.torch.retrain.axis_names import name_axes
from openwork.torch.retrain.check_file import FLOAT_TOLERANCE, warn_if_different
from openwork.torch.retrain.names import check_names
from openwork.torch.structure import check_forward, one_line

__all__ = ["deploy_paths", "export_onnx"]

_LOG = logging.getLogger("openwork")
# Protobuf cannot hold more in one message; the graph beside the weights needs room too.
LARGEST_FILE = 2 * 1024**3 - 64 * 1024**2
_OLDEST_OPSET = 7
# torch's newer exporter keeps the names of weights, but writes no opset below this.
_OLDEST_NEW_OPSET = 18
_LOGGERS = ("onnxscript", "torch.onnx", "onnx_ir", "torch._subclasses.fake_tensor")
# torch's exporters keep state in their modules, and silencing replaces sys.stdout: one export at a time.
_ONE_AT_A_TIME = threading.RLock()


def deploy_paths(save_path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """``<prefix>_deploy_model.onnx`` and ``<prefix>_fake_quant_model.onnx``; a path ending in / has no prefix.

    Raises:
        FileError: no path, or the folder cannot be made or written.
    """
    folder, prefix = os.path.split(path_text(save_path, "save_path", empty=True))
    lead = f"{prefix}_" if prefix else ""
    paths = (Path(folder) / f"{lead}deploy_model.onnx", Path(folder) / f"{lead}fake_quant_model.onnx")
    for path in paths:
        check_writable(path, "save_path")
    return paths


def export_onnx(
    model: nn.Module,
    paths: Sequence[Path],
    input_data: tuple[Any, ...],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    opset: int = 18,
    compared: bool = True,
) -> None:
    """Write the eval-mode model to ONNX files that ``onnx.checker`` accepts.

    The files appear when all of them are whole; an existing one is replaced with a warning. Each is one file;
    weights go to a second one beside it (``.data``) only above 2 GB.

    Args:
        model: the model; its training flags are left as they were.
        paths: the files; their folders exist.
        input_data: positional arguments of forward.
        input_names, output_names: names in the file.
        dynamic_axes: ``{name: {axis: name}}`` or ``{name: [axes]}``.
        opset: ONNX operator set. Below 18 torch's older exporter is used.
        compared: run the file in onnxruntime, if it is installed, and warn if it computes something else.

    Raises:
        ConfigError: no such operator set; names or axes that are not there.
        ModelError: the forward fails on these inputs, or torch cannot export the model (says why).
        FileError: a file cannot be written.
    """
    _check_opset(opset)
    options = {
        "input_names": list(input_names) if input_names else None,
        "output_names": list(output_names) if output_names else None,
        "opset_version": opset,
    }
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        result = check_forward(model, input_data)
        check_names(model, input_data, result, input_names, output_names, dynamic_axes)

        def compare(file: Path, shown: Path) -> None:
            if shown == paths[0]:  # the others are equal to it
                warn_if_different(file, input_data, result, FLOAT_TOLERANCE, shown)

        with _ONE_AT_A_TIME:
            _write_all(_exported(model, input_data, options, dynamic_axes), paths, compare if compared else None)
    finally:
        for module, training in flags.items():
            module.training = training


def _check_opset(opset: int) -> None:
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or isinstance(opset, bool) or not _OLDEST_OPSET <= opset <= newest:
        raise ConfigError(f"opset is {opset!r}; allowed: {_OLDEST_OPSET} to {newest}")


def _write_all(
    write: Callable[[Path], None], paths: Sequence[Path], compare: Callable[[Path, Path], None] | None
) -> None:
    """Write into folders beside the targets, check, and only then rename."""
    import onnx

    with contextlib.ExitStack() as stack:
        parts: list[tuple[Path, Path]] = []
        for path in paths:
            try:
                folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            except OSError as error:
                raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                write(folder / path.name)
            except OSError as error:
                raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
            try:
                onnx.checker.check_model(str(folder / path.name))
            except onnx.checker.ValidationError as error:
                raise ModelError(f"{path}: torch exported what onnx.checker refuses: {one_line(error)}") from error
            if compare is not None:
                compare(folder / path.name, path)
            # External data comes before the file that names it.
            made = sorted(folder.iterdir(), key=lambda part: part.name == path.name)
            parts += [(part, path.parent / part.name) for part in made]
        existing = [path for path in paths if path.exists()]
        for part, target in parts:
            try:
                os.replace(part, target)
            except OSError as error:
                raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
    for path in existing:
        _LOG.warning("%s existed and was replaced", path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        loud = {name: logging.getLogger(name).level for name in _LOGGERS}
        for name in loud:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for name, level in loud.items():
                logging.getLogger(name).setLevel(level)


def needs_external_data(model: nn.Module) -> bool:
    """Whether the weights are too large for one ONNX file."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > LARGEST_FILE


def _root(error: BaseException) -> BaseException:
    """What went wrong first; torch's exporter wraps it in advice on itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _exported(
    model: nn.Module, input_data: tuple[Any, ...], options: dict[str, Any], dynamic_axes: Mapping[str, Any] | None
) -> Callable[[Path], None]:
    """Export once; what is returned writes the result to a file."""
    axes: Any = None
    if dynamic_axes:
        axes = {name: dict(of) if isinstance(of, Mapping) else list(of) for name, of in dynamic_axes.items()}
    failure: Exception | None = None
    if input_data and isinstance(input_data[-1], Mapping):
        input_data = (*input_data, {})  # the exporters take a last dict for keyword arguments
    if options["opset_version"] >= _OLDEST_NEW_OPSET:
        try:
            with _quiet():
                program = torch.onnx.export(
                    model, input_data, dynamo=True, verbose=False, optimize=True, dynamic_axes=axes, **options
                )
            assert program is not None
            name_axes(program, dynamic_axes)
        except Exception as error:
            failure = error
            _LOG.info("torch's newer exporter fails (%s); the older one is tried", one_line(error)[:200])
        else:
            external = needs_external_data(model)
            return lambda path: program.save(str(path), external_data=external)

    def write(path: Path) -> None:
        try:
            with _quiet():
                torch.onnx.export(model, input_data, str(path), dynamo=False, dynamic_axes=axes, **options)
        except OSError:
            raise
        except Exception as error:
            why = one_line(_root(failure or error))
            raise ModelError(f"{type(model).__name__} cannot be exported to ONNX: {why}") from error

    return write
