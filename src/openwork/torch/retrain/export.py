"""Export to ONNX: whole files, checked."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openwork.errors import FileError, ModelError
from openwork.files import check_writable
from openwork.torch.structure import one_line

__all__ = ["deploy_paths", "export_onnx"]

_LOG = logging.getLogger("openwork")
# Protobuf cannot hold more in one message.
_LARGEST = 2 * 1024**3 - 64 * 1024**2
_OLDEST_NEW_OPSET = 18


def deploy_paths(save_path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """``<prefix>_deploy_model.onnx`` and ``<prefix>_fake_quant_model.onnx``; a path ending in / has no prefix.

    Raises:
        FileError: the folder cannot be made or written.
    """
    text = os.fspath(save_path)
    folder, prefix = os.path.split(text)
    lead = f"{prefix}_" if prefix else ""
    paths = (Path(folder) / f"{lead}deploy_model.onnx", Path(folder) / f"{lead}fake_quant_model.onnx")
    for path in paths:
        check_writable(path, "save_path")
    return paths


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        loud = {name: logging.getLogger(name).level for name in ("onnxscript", "torch.onnx", "onnx_ir")}
        for name in loud:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in loud.items():
                logging.getLogger(name).setLevel(level)


def export_onnx(
    model: nn.Module,
    path: Path,
    input_data: tuple[Any, ...],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    opset: int = 18,
) -> None:
    """Write the eval-mode model to one ONNX file (external data only above 2 GB), checked by onnx.checker.

    Args:
        model: the model; its training flags are left as they were.
        path: the file; its folder exists. An existing file is replaced with a warning.
        input_data: positional arguments of forward.
        input_names, output_names: names in the file.
        dynamic_axes: ``{name: {axis: name}}`` or ``{name: [axes]}``.
        opset: ONNX operator set. Below 18 torch's older exporter is used.

    Raises:
        ModelError: torch cannot export the model (says why).
        FileError: the file cannot be written.
    """
    import onnx

    flags = {module: module.training for module in model.modules()}
    model.eval()
    existed = path.exists()
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        temporary = folder / path.name
        _export(model, temporary, input_data, input_names, output_names, dynamic_axes, opset)
        onnx.checker.check_model(str(temporary))
        for part in sorted(folder.iterdir(), key=lambda p: p.suffix == ".onnx"):
            os.replace(part, path.parent / part.name)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        for module, training in flags.items():
            module.training = training
        shutil.rmtree(folder, ignore_errors=True)
    if existed:
        _LOG.warning("%s existed and was replaced", path)


def _export(
    model: nn.Module,
    path: Path,
    input_data: tuple[Any, ...],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: Mapping[str, Any] | None,
    opset: int,
) -> None:
    size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    names: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
    failures = []
    if opset >= _OLDEST_NEW_OPSET:
        try:
            with _quiet():
                program = torch.onnx.export(
                    model,
                    input_data,
                    dynamo=True,
                    opset_version=opset,
                    verbose=False,
                    optimize=True,
                    **names,
                    **({"dynamic_axes": _checked_axes(dynamic_axes)} if dynamic_axes else {}),
                )
            assert program is not None
            program.save(str(path), external_data=size > _LARGEST)
            return
        except Exception as error:
            failures.append(error)
            _LOG.info("torch's newer exporter fails (%s); the older one is tried", one_line(error)[:200])
    try:
        with _quiet():
            torch.onnx.export(
                model,
                input_data,
                str(path),
                dynamo=False,
                opset_version=opset,
                dynamic_axes=dynamic_axes,
                **names,
            )
    except Exception as error:
        first = failures[0] if failures else error
        raise ModelError(f"{type(model).__name__} cannot be exported to ONNX: {one_line(first)}") from error


def _checked_axes(dynamic_axes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(axes) if isinstance(axes, Mapping) else list(axes) for name, axes in dynamic_axes.items()}
