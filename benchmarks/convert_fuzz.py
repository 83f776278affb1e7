"""Mutated and random model bytes through convert, inspect and decompress: nothing but one-line errors may come out.

    python benchmarks/convert_fuzz.py --count 100000 --seed 0

Counts what happened; ends with exit code 1, and the offending bytes in a file, at the first crash, hang or file left
behind. Seeds are small models with every kind of layer, bodies, local functions and external data.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from convert_seeds import seed_models
from openwork.cli import main as command_line
from openwork.convert.job import Options, convert, decompress, inspect
from openwork.errors import OpenworkError

TIMEOUT_S = 20


def mutate(rng: np.random.Generator, seeds: list[bytes]) -> bytes:
    """A seed with a few changes, or plain random bytes."""
    kind = rng.integers(10)
    if kind == 0:
        return rng.bytes(int(rng.integers(0, 400)))
    data = bytearray(seeds[rng.integers(len(seeds))])
    if kind == 1:
        return bytes(data[: rng.integers(len(data))])
    for _ in range(int(rng.geometric(0.3))):
        place = int(rng.integers(len(data) or 1))
        change = rng.integers(7)
        if not data or change == 0:
            data[place:place] = rng.bytes(int(rng.integers(1, 9)))
        elif change == 1:
            data[place] ^= 1 << int(rng.integers(8))
        elif change == 2:
            data[place] = int(rng.integers(256))
        elif change == 3:
            del data[place : place + int(rng.geometric(0.1))]
        elif change == 4:
            end = place + int(rng.geometric(0.05))
            data[place:place] = data[place:end]
        elif change == 5:
            other = seeds[rng.integers(len(seeds))]
            start = int(rng.integers(len(other)))
            data[place:place] = other[start : start + int(rng.geometric(0.02))]
        else:
            # Names and small numbers matter most: change a byte of text or a varint near its end.
            data[place] = int(rng.choice([0, 1, 2, 3, 7, 0x7F, 0x80, 0xFF, ord("x"), ord("w"), ord("/")]))
    return bytes(data)


def structured(rng: np.random.Generator, models: list[bytes]) -> bytes:
    """A seed with changes made on the level of messages: the file parses, its meaning is broken."""
    import onnx

    model = onnx.ModelProto.FromString(models[rng.integers(len(models))])
    graph = model.graph
    for _ in range(int(rng.geometric(0.5))):
        nodes, tensors = graph.node, graph.initializer
        change = rng.integers(12)
        node = nodes[rng.integers(len(nodes))] if nodes else None
        tensor = tensors[rng.integers(len(tensors))] if tensors else None
        if change == 0 and node is not None and node.input:
            names = [name for other in nodes for name in [*other.input, *other.output]]
            node.input[rng.integers(len(node.input))] = names[rng.integers(len(names))]
        elif change == 1 and tensor is not None and tensor.dims:
            tensor.dims[rng.integers(len(tensor.dims))] = int(rng.choice([-1, 0, 1, 3, 2**31, 2**62]))
        elif change == 2 and tensor is not None:
            tensor.data_type = int(rng.integers(0, 30))
        elif change == 3 and node is not None and node.attribute:
            attribute = node.attribute[rng.integers(len(node.attribute))]
            attribute.i = int(rng.choice([-1, 0, 1, 2, 7, 2**40]))
            attribute.ints.append(int(rng.integers(-3, 9)))
        elif change == 4 and node is not None:
            node.op_type = str(rng.choice(["Conv", "MatMul", "Gemm", "Reshape", "Transpose", "Constant", "Nothing"]))
        elif change == 5 and node is not None:
            node.ClearField("input" if rng.integers(2) else "output")
        elif change == 6:
            model.opset_import[0].version = int(rng.choice([-1, 0, 6, 7, 11, 13, 29, 2**40]))
        elif change == 7:
            model.ir_version = int(rng.choice([0, 1, 3, 9, 99, 2**50]))
        elif change == 8 and tensor is not None:
            tensor.raw_data = tensor.raw_data[: rng.integers(len(tensor.raw_data) + 1)]
        elif change == 9 and node is not None:
            nodes.append(node)
        elif change == 10 and node is not None and node.attribute:
            node.attribute[rng.integers(len(node.attribute))].type = int(rng.integers(0, 14))
        elif change == 11 and model.metadata_props:
            entry = model.metadata_props[rng.integers(len(model.metadata_props))]
            entry.value = entry.value[: rng.integers(len(entry.value) + 1)]
    return model.SerializeToString()


def one(path: Path, data: bytes, through_command_line: bool) -> str:
    """Run everything on one file; returns what happened. Raises on anything but an expected error."""
    folder = path.parent
    before = set(os.listdir(folder))
    path.write_bytes(data)
    result = "converted"
    if through_command_line:
        errors, text = io.StringIO(), io.StringIO()
        code: object = 0
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(text):
            try:
                command_line(["convert", f"--model={path}", f"--output={folder / 'out'}", "--sparsity=1"])
            except SystemExit as end:
                code = end.code
        if code:
            result = "refused"
            lines = errors.getvalue().splitlines()
            assert len(lines) == 1, lines
            assert lines[0].startswith("openwork: error: "), lines
    else:
        for place, task in enumerate(
            (
                lambda: inspect(str(path)),
                lambda: convert(Options(str(path), str(folder / "out"), sparsity=1)),
                lambda: decompress(str(path), str(folder / "back.onnx")),
            )
        ):
            try:
                task()
                result = "decompressed" if place == 2 else result
            except OpenworkError:
                result = "refused" if place == 1 else result
    assert path.read_bytes() == data, "the input was changed"
    path.unlink()
    left = set(os.listdir(folder)) - before
    if result == "refused":
        assert not left - {"back.onnx", "back.onnx.data"}, left
    for name in left:
        (folder / name).unlink()
    return result


def fuzz(count: int, seed: int, folder: Path, show: bool = False) -> collections.Counter[str]:
    """Run `count` cases; returns how often what happened."""
    rng = np.random.default_rng(seed)
    models = seed_models(folder)
    seen: collections.Counter[str] = collections.Counter()
    path = folder / "fuzzed.onnx"

    def hang(*_: object) -> None:
        raise TimeoutError(f"no end after {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, hang)
    start = time.monotonic()
    for case in range(count):
        data = structured(rng, models) if rng.integers(3) == 0 else mutate(rng, models)
        signal.alarm(TIMEOUT_S)
        try:
            seen[one(path, data, through_command_line=case % 10 == 0)] += 1
        except BaseException:
            keep = Path(tempfile.gettempdir()) / f"openwork_fuzz_{seed}_{case}.onnx"
            keep.write_bytes(data)
            print(f"case {case} of seed {seed}: bytes kept in {keep}", file=sys.stderr)
            raise
        finally:
            signal.alarm(0)
        if show and case % 5000 == 4999:
            print(f"{case + 1:,} cases, {time.monotonic() - start:.0f} s, {dict(seen)}", flush=True)
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(dict(fuzz(arguments.count, arguments.seed, Path(name), show=True)))
