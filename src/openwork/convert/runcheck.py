"""Run two models side by side in onnxruntime: are the outputs equal, how long do they load and run?"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.convert.shapes import parse_input_shape
from openwork.errors import ConfigError, ConversionError, FileError, ModelError, nearest

__all__ = ["Check", "OutputCheck", "random_inputs", "run_check"]

_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(int32)": np.int32,
    "tensor(uint32)": np.uint32,
    "tensor(int64)": np.int64,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


@dataclass
class OutputCheck:
    """One output: equal bit for bit, equal as numbers, or how far apart."""

    name: str
    shape: list[int]
    bit_equal: bool
    equal: bool
    largest_difference: float


@dataclass
class Check:
    """The answer of `run_check`; times in seconds, dense model first."""

    outputs: list[OutputCheck]
    load_s: tuple[float, float]
    latency_s: tuple[float, float]
    file_bytes: tuple[int, int]
    inputs: int

    @property
    def bit_equal(self) -> bool:
        return all(output.bit_equal for output in self.outputs)


def random_inputs(
    session: Any, shapes: Mapping[str, list[int]], generator: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """Random inputs for an onnxruntime session: normal floats, integers 0 and 1, 1 for dynamic sizes.

    Raises:
        ConfigError: `shapes` names an input that there is not, or has another number of axes.
        ConversionError: an input is no tensor of numbers.
    """
    inputs = {entry.name: entry for entry in session.get_inputs()}
    for name in shapes:
        if name not in inputs:
            raise ConfigError(f"--input_shape: the model has no input {name!r}; {nearest(name, inputs)}")
    feeds: dict[str, npt.NDArray[Any]] = {}
    for name, entry in inputs.items():
        if entry.type not in _TYPES:
            raise ConversionError(f"input {name!r} is of {entry.type}; give it with --input")
        shape = [size if isinstance(size, int) and size > 0 else 1 for size in entry.shape]
        if name in shapes:
            if entry.shape and len(shapes[name]) != len(shape):
                raise ConfigError(f"--input_shape {name}: {len(shapes[name])} sizes for {len(shape)} axes")
            shape = [max(1, size) for size in shapes[name]]
        dtype = np.dtype(_TYPES[entry.type])
        if dtype.kind == "f":
            feeds[name] = generator.standard_normal(shape).astype(dtype)
        else:
            # 0 and 1 are in range wherever numbers are indices or masks.
            feeds[name] = generator.integers(0, 2, shape).astype(dtype)
    return feeds


def _load(path: str, threads: int) -> tuple[Any, float]:
    import onnxruntime

    if not os.path.isfile(path):
        raise FileError(f"model {path} does not exist or is not a file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    start = time.perf_counter()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"{path}: onnxruntime cannot load it: {_one_line(error)}") from error
    return session, time.perf_counter() - start


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _bytes(path: str) -> int:
    data = Path(f"{path}.data")
    return os.path.getsize(path) + (os.path.getsize(data) if os.path.isfile(data) else 0)


def run_check(
    dense: str,
    sparse: str,
    given: list[Mapping[str, npt.NDArray[Any]]] | None = None,
    input_shape: str | None = None,
    random: int = 3,
    repeats: int = 10,
    seed: int = 0,
    threads: int = 1,
) -> Check:
    """Feed both models the same inputs.

    Args:
        dense: the original model.
        sparse: the converted model.
        given: inputs to use besides the random ones.
        input_shape: ATC's text; sizes for dynamic axes.
        random: number of random inputs.
        repeats: timed runs of each model, alternating.
        seed: of the random inputs.
        threads: of onnxruntime.

    Raises:
        ModelError: onnxruntime cannot load or run a model.
        ConversionError: the models have different inputs or outputs.
    """
    loads: list[list[float]] = [[], []]
    sessions: list[Any] = [None, None]
    for _ in range(2):
        # Twice, and the better time: the first load reads the file from disk.
        for place, path in enumerate((dense, sparse)):
            sessions[place], seconds = _load(path, threads)
            loads[place].append(seconds)
    for what in ("get_inputs", "get_outputs"):
        names = [[entry.name for entry in getattr(session, what)()] for session in sessions]
        if names[0] != names[1]:
            raise ConversionError(f"{dense} and {sparse} have different {what[4:]}: {names[0]} and {names[1]}")
    generator = np.random.default_rng(seed)
    shapes = parse_input_shape(input_shape) if input_shape is not None else {}
    feeds = [dict(feed) for feed in given or []]
    feeds += [random_inputs(sessions[0], shapes, generator) for _ in range(random)]
    if not feeds:
        raise ConfigError("run-check needs an input: give --input, or --random 1 or more")
    output_names: list[str] = [entry.name for entry in sessions[0].get_outputs()]
    checks = {name: OutputCheck(name, [], True, True, 0.0) for name in output_names}
    for feed in feeds:
        results = []
        for session, path in zip(sessions, (dense, sparse), strict=True):
            try:
                results.append(session.run(None, feed))
            except Exception as error:
                raise ModelError(f"{path}: onnxruntime cannot run it: {_one_line(error)}") from error
        for name, first, second in zip(output_names, *results, strict=True):
            _compare(checks[name], first, second)
    times: list[list[float]] = [[], []]
    for _ in range(max(1, repeats)):
        for place, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, feeds[-1])
            times[place].append(time.perf_counter() - start)
    return Check(
        outputs=list(checks.values()),
        load_s=(min(loads[0]), min(loads[1])),
        latency_s=(statistics.median(times[0]), statistics.median(times[1])),
        file_bytes=(_bytes(dense), _bytes(sparse)),
        inputs=len(feeds),
    )


def _compare(check: OutputCheck, first: Any, second: Any) -> None:
    if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray):
        same = repr(first) == repr(second)
        check.bit_equal &= same
        check.equal &= same
        return
    check.shape = list(first.shape)
    if first.shape != second.shape or first.dtype != second.dtype:
        check.bit_equal = check.equal = False
        check.largest_difference = float("inf")
        return
    check.bit_equal &= first.tobytes() == second.tobytes()
    if first.dtype.kind not in "fiub":
        check.equal &= bool((first == second).all())
        return
    one, two = first.astype(np.float64), second.astype(np.float64)
    check.equal &= bool(np.array_equal(one, two, equal_nan=True))
    with np.errstate(invalid="ignore"):
        gap = np.abs(one - two)
    gap = gap[~(np.isnan(gap) & ((one == two) | (np.isnan(one) & np.isnan(two))))]
    if gap.size:
        check.largest_difference = max(check.largest_difference, float(np.nan_to_num(gap.max(), nan=np.inf)))
