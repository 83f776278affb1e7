"""The conversion itself: read, look, rewrite, write, report. The command line only fills in `Options`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from openwork.convert.detect import Detection, detect
from openwork.convert.emit import CONTAINERS, write_layers
from openwork.convert.report import Report, build_report
from openwork.convert.rewrite import compress
from openwork.convert.shapes import apply_input_shapes, cut_at, parse_input_shape
from openwork.convert.undo import is_compressed, restore
from openwork.errors import ConfigError, ConversionError, FileError
from openwork.files import write_text
from openwork.onnx.modelfile import ModelFile, data_path

__all__ = ["EMITS", "FRAMEWORKS", "Options", "StrictError", "convert", "decompress", "inspect"]

FRAMEWORKS = {3: "TensorFlow", 5: "ONNX"}
EMITS = ("onnx", "dense", "nvidia", "ascend")
NEGATIVE_ZEROS = ("keep", "drop")

_log = logging.getLogger("openwork.convert")

Progress = Callable[[str, int, int], None]


class StrictError(ConversionError):
    """A layer does not qualify and ``--strict`` was asked for."""

    exit_code = 3


@dataclass(frozen=True)
class Options:
    """What to convert, and how.

    Attributes:
        model: the file (or SavedModel folder).
        output: path of the result without suffix.
        framework: 3 TensorFlow, 5 ONNX.
        sparsity: 1 compresses layers that qualify, 0 none.
        emit: ``onnx`` (compressed operators), ``dense`` (plain ONNX), ``nvidia`` or ``ascend`` (arrays).
        container: ``npz`` or ``safetensors``, for arrays.
        input_shape: ATC's text, or None.
        out_nodes: ATC's text, or None.
        strict: a layer with a constant weight that does not qualify is an error.
        negative_zeros: ``keep`` stores the sign of zeros that fall outside the index, ``drop`` makes them +0.0.
    """

    model: str
    output: str
    framework: int = 5
    sparsity: int = 0
    emit: str = "onnx"
    container: str = "npz"
    input_shape: str | None = None
    out_nodes: str | None = None
    strict: bool = False
    negative_zeros: str = "keep"

    def check(self) -> None:
        """Raise ConfigError for a value that is not allowed."""
        if self.framework not in FRAMEWORKS:
            allowed = ", ".join(f"{number} ({name})" for number, name in FRAMEWORKS.items())
            raise ConfigError(f"--framework {self.framework}: allowed: {allowed}")
        if self.sparsity not in (0, 1):
            raise ConfigError(f"--sparsity {self.sparsity}: allowed: 0 (off), 1 (2:4)")
        for option, value, allowed_values in (
            ("--emit", self.emit, EMITS),
            ("--container", self.container, CONTAINERS),
            ("--negative_zeros", self.negative_zeros, NEGATIVE_ZEROS),
        ):
            if value not in allowed_values:
                raise ConfigError(f"{option} {value!r}: allowed: {', '.join(allowed_values)}")
        if self.input_shape is not None:
            parse_input_shape(self.input_shape)


def convert(options: Options, progress: Progress | None = None) -> Report:
    """Convert a model. The output appears whole or not at all; the input is never changed.

    Args:
        options: what to do.
        progress: called with (what is being done, steps done, steps in all).

    Returns:
        The report, which is also written to ``<output>.json``.

    Raises:
        ConfigError: an option has a value that is not allowed.
        FileError: a file cannot be read or written.
        ConversionError: the model is broken or of a kind that cannot be converted.
        StrictError: `Options.strict`, and a layer does not qualify.
    """
    options.check()
    stem = _output_stem(options)
    suffix = ".onnx" if options.emit in ("onnx", "dense") else f".{options.container}"
    target, report_path = stem.with_name(stem.name + suffix), stem.with_name(stem.name + ".json")
    source = Path(options.model)
    _refuse_same_file(source, [target, data_path(target), report_path])
    with _open_model(options) as file:
        # A frozen graph was cut and given its shapes before it became ONNX.
        if options.framework == 5 or os.path.isdir(source):
            if options.input_shape is not None:
                apply_input_shapes(file.model, parse_input_shape(options.input_shape))
            if options.out_nodes is not None:
                cut_at(file.model, options.out_nodes)
        detection, report = _look(file, options, progress)
        if options.strict:
            _be_strict(report, file)
        if options.sparsity and options.emit == "onnx":
            compress(file, detection)
        with _all_or_nothing([target, data_path(target), report_path]):
            if suffix == ".onnx":
                written = file.save(target, _named(progress, "writing"))
            else:
                write_layers(file, detection, target, options.emit, _named(progress, "packing"))
                written = [target]
            report.output = str(target)
            report.files = [str(path) for path in written]
            report.file_bytes_after = sum(path.stat().st_size for path in written)
            write_text(report_path, json.dumps(report.as_json(), indent=1) + "\n")
    _log.info("%s written", ", ".join(report.files))
    return report


def inspect(model: str, framework: int = 5, progress: Progress | None = None) -> Report:
    """The report of a conversion, without writing anything."""
    options = Options(model=model, output="", framework=framework, sparsity=1)
    options.check()
    with _open_model(options) as file:
        return _look(file, options, progress)[1]


def decompress(source: str, output: str, progress: Progress | None = None) -> list[Path]:
    """Give the original of a compressed model back, bit for bit.

    Returns:
        The files written.

    Raises:
        FileError: a file cannot be read or written.
        ConversionError: not a model, or not compressed by `convert`.
    """
    target = Path(output)
    _need_folder(target, "output")
    _refuse_same_file(Path(source), [target, data_path(target)])
    file = ModelFile.load(source)
    try:
        restore(file)
        with _all_or_nothing([target, data_path(target)]):
            return file.save(target, _named(progress, "writing"))
    finally:
        file.close()


def _look(file: ModelFile, options: Options, progress: Progress | None) -> tuple[Detection, Report]:
    size_before = _size(file)
    if is_compressed(file.model):
        _log.info("%s is compressed already; its original is looked at", file.path)
        restore(file)
    signs = options.negative_zeros == "keep" and options.emit in ("onnx", "dense")
    detection = detect(file, _named(progress, "reading weights"), signs)
    report = build_report(
        detection,
        file.model,
        model=options.model,
        framework=options.framework,
        sparsity=options.sparsity,
        emit=options.emit,
        file_bytes_before=size_before,
    )
    if not options.sparsity:
        for layer in report.layers:
            layer.compressed_operator, layer.bytes_after = None, layer.bytes_before
    return detection, report


def _size(file: ModelFile) -> int:
    total = 0
    for path in file.files:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _be_strict(report: Report, file: ModelFile) -> None:
    wrong = [layer for layer in report.layers if layer.reason is not None and layer.weight is not None]
    if wrong:
        first = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise StrictError(
            f"{file.path}: --strict: {first.operator} {first.name!r} does not qualify: {first.reason}{more}"
        )


@contextlib.contextmanager
def _open_model(options: Options) -> Iterator[ModelFile]:
    if options.framework == 5:
        file = ModelFile.load(options.model)
        try:
            yield file
        finally:
            file.close()
        return
    from openwork.convert.tensorflow import to_onnx

    with tempfile.TemporaryDirectory(prefix="openwork-") as folder:
        path = Path(folder) / "model.onnx"
        to_onnx(options.model, path, options.input_shape, options.out_nodes)
        file = ModelFile.load(path)
        try:
            yield file
        finally:
            file.close()


def _output_stem(options: Options) -> Path:
    if not options.output or options.output.endswith(("/", os.sep)):
        raise ConfigError(f"--output {options.output!r}: a path without suffix is needed, such as out/model")
    stem = Path(options.output)
    if stem.suffix == ".onnx":
        stem = stem.with_suffix("")
    _need_folder(stem, "--output")
    return stem


def _need_folder(path: Path, option: str) -> None:
    folder = path.parent
    if not os.path.isdir(folder):
        raise FileError(f"{option} {path}: the folder {folder} does not exist")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name[:40]}."):
            pass
    except OSError as error:
        raise FileError(f"{option} {path}: the folder {folder} cannot be written: {error.strerror or error}") from error


def _refuse_same_file(source: Path, outputs: list[Path]) -> None:
    for output in outputs:
        if os.path.isdir(output):
            raise FileError(f"{output} is a folder; the output is a file")
        if os.path.realpath(source) == os.path.realpath(output):
            raise ConversionError(f"{output}: the output would replace the input; choose another")


@contextlib.contextmanager
def _all_or_nothing(paths: list[Path]) -> Iterator[None]:
    """Remove files that were not there before when something goes wrong between writing the first and the last."""
    new = [path for path in paths if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


def _named(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(what, done, total)
