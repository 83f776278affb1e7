"""Speed and memory of the converter, as ratios to reading and writing the same file with the onnx package.

    OMP_NUM_THREADS=1 python benchmarks/convert_speed.py [--large]

Prints: packing and checking in GB/s beside a plain copy; conversion of a 537 MB model beside onnx.load + onnx.save,
alternating, medians; peak memory of a process that converts; load time of a 16.8-million-weight int8 layer in
onnxruntime. --large adds a model of 2.4 GB with external data.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from convert_masking import keep_two_of_four
from openwork.convert.job import Options, convert
from openwork.sparsity.pack24 import check24, pack24, unpack24

SIZE = 4096


def timed(task: Callable[[], object]) -> tuple[float, float]:
    """(elapsed, processor) seconds."""
    wall, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    task()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter() - wall, after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime


def best(task: Callable[[], object], repeats: int = 5) -> float:
    """Least processor time: on a shared machine the elapsed time says little."""
    return min(timed(task)[1] for _ in range(repeats))


def weight(rng: np.random.Generator) -> np.ndarray:
    return keep_two_of_four(rng.standard_normal((SIZE, SIZE)).astype(np.float32), 1)


def packing(dense: np.ndarray) -> None:
    """GB of dense weight per second of one thread."""
    print("GB/s of dense weight, one thread, least of five processor times")
    print(f"{'type':<9}{'axis':>5}{'copy':>8}{'check':>8}{'pack':>8}{'unpack':>8}")
    integers = np.clip(dense * 40, -127, 127).astype(np.int8)
    for array in (dense, dense.astype(np.float16), integers):
        for axis in (1, 0):
            turned = array if axis else np.ascontiguousarray(array.T)
            packed = pack24(turned, axis)
            rates = [
                turned.nbytes / best(task) / 1e9
                for task in (
                    turned.copy,
                    lambda turned=turned, axis=axis: check24(turned, axis),
                    lambda turned=turned, axis=axis: pack24(turned, axis),
                    lambda packed=packed: unpack24(packed),
                )
            ]
            print(f"{array.dtype.name:<9}{axis:>5}" + "".join(f"{rate:>8.2f}" for rate in rates), flush=True)


def stack_of(matrices: int, dense: np.ndarray, path: Path, external: bool) -> None:
    """A model of so many matrix products, written piece by piece."""
    names = [f"w{place}" for place in range(matrices)]
    kept = int(np.flatnonzero(dense[0])[0])
    nodes = [
        helper.make_node("Gemm", ["x" if place == 0 else f"y{place - 1}", name], [f"y{place}"], transB=1)
        for place, name in enumerate(names)
    ]
    tensors = []
    if external:
        with open(path.with_name("weights.bin"), "wb") as stream:
            for place, name in enumerate(names):
                dense[0, kept] = place + 1
                stream.write(dense.data)
                tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dense.shape)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (
                    ("location", "weights.bin"),
                    ("offset", place * dense.nbytes),
                    ("length", dense.nbytes),
                ):
                    tensor.external_data.add(key=key, value=str(value))
                tensors.append(tensor)
    else:
        for place, name in enumerate(names):
            dense[0, kept] = place + 1
            tensors.append(numpy_helper.from_array(dense, name))
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIZE])],
        [helper.make_tensor_value_info(f"y{matrices - 1}", TensorProto.FLOAT, ["n", SIZE])],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def converting(path: Path, folder: Path, repeats: int) -> None:
    """Ratio to onnx.load + onnx.save."""

    def plain() -> None:
        onnx.save(onnx.load(path), folder / "plain.onnx")

    def compressing() -> None:
        convert(Options(str(path), str(folder / "out"), sparsity=1))

    times: dict[str, list[tuple[float, float]]] = {"plain": [], "convert": []}
    for _ in range(repeats):
        times["plain"].append(timed(plain))
        times["convert"].append(timed(compressing))
    for kind, place in (("elapsed", 0), ("processor", 1)):
        first, second = (statistics.median(entry[place] for entry in times[name]) for name in times)
        print(
            f"convert {path.stat().st_size / 1e6:.0f} MB, {kind}: onnx load + save {first:.2f} s, "
            f"convert {second:.2f} s, ratio {second / first:.2f} (median of {repeats})",
            flush=True,
        )


MEASURE = """
import sys
from openwork.convert.job import Options, convert
import onnx, onnxruntime
def anonymous():
    with open("/proc/self/status") as stream:
        return {line.split(":")[0]: int(line.split()[1]) for line in stream if line.startswith(("RssAnon", "VmHWM"))}
import threading, time
peak = [0]
def watch():
    while True:
        peak[0] = max(peak[0], anonymous()["RssAnon"])
        time.sleep(0.002)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
report = convert(Options(sys.argv[1], sys.argv[2], sparsity=1))
high = anonymous()["VmHWM"]
print(before["RssAnon"], peak[0], before["VmHWM"], high, report.qualifying)
"""


def memory(path: Path, folder: Path, size: int, largest: int) -> None:
    """Peak memory of a process of its own, above what its libraries take."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(folder / "mem")], capture_output=True, text=True, check=True
    )
    before, peak, before_all, peak_all, layers = (int(number) for number in done.stdout.split())
    print(
        f"memory, model {size / 1e6:.0f} MB, largest weight {largest / 1e6:.0f} MB, {layers} layers: "
        f"{(peak - before) / 1e3:.0f} MB of its own at most ({(peak - before) * 1024 / largest:.2f}x the largest "
        f"weight); with mapped file pages {(peak_all - before_all) / 1e3:.0f} MB",
        flush=True,
    )


def loading(dense: np.ndarray, folder: Path) -> None:
    """Load time of one int8 layer of 16.8 million weights."""
    import onnxruntime

    integers = np.ascontiguousarray(np.clip(dense * 40, -127, 127).astype(np.int8).T)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", SIZE])],
        [numpy_helper.from_array(integers, "w")],
    )
    path = folder / "int8.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    convert(Options(str(path), str(folder / "int8_out"), sparsity=1))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name in ("int8.onnx", "int8_out.onnx"):
        tries = [timed(lambda: onnxruntime.InferenceSession(str(folder / name), options)) for _ in range(7)]  # noqa: B023
        print(
            f"load {name} ({(folder / name).stat().st_size:,} bytes): {min(t[1] for t in tries):.3f} s processor, "
            f"{min(t[0] for t in tries):.3f} s elapsed (least of 7)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also a model of 2.4 GB")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    dense = weight(np.random.default_rng(0))
    packing(dense)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loading(dense, folder)
        stack_of(8, dense, folder / "model.onnx", external=False)
        converting(folder / "model.onnx", folder, arguments.repeats)
        memory(folder / "model.onnx", folder, (folder / "model.onnx").stat().st_size, dense.nbytes)
        if arguments.large:
            (folder / "large").mkdir()
            stack_of(36, dense, folder / "large" / "model.onnx", external=True)
            memory(folder / "large" / "model.onnx", folder, 36 * dense.nbytes, dense.nbytes)


if __name__ == "__main__":
    main()
