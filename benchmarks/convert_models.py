"""Convert whole networks: bit-equality in onnxruntime, round trip, file size against 0.5 + 1/bits.

    python benchmarks/convert_models.py [--real FOLDER]

Exports ResNet-50, MobileNetV2, ViT-B/16 and a BERT encoder (random weights: only shapes matter here), masks them to
2:4 by magnitude, and converts them. FOLDER may hold further .onnx files, which are converted as they are and masked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "torch"))

from convert_masking import mask_to_24
from openwork.convert.job import Options, convert, decompress
from openwork.convert.runcheck import run_check
from openwork.errors import ModelError


def exports(folder: Path, dynamo: bool) -> list[tuple[str, Path, str | None]]:
    """(name, file, input shapes) of the networks."""
    import torch

    from nets.vision import allow_torchvision

    allow_torchvision()
    import torchvision
    from transformers import BertConfig, BertModel

    class Encoder(torch.nn.Module):
        """BERT with token numbers as its only input."""

        def __init__(self, network: torch.nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.network(input_ids=tokens)[0]

    torch.manual_seed(0)
    image = torch.randn(1, 3, 224, 224)
    tokens = torch.ones(1, 32, dtype=torch.int64)
    config = BertConfig(num_hidden_layers=4, attn_implementation="eager", return_dict=False)
    networks = [
        ("resnet50", torchvision.models.resnet50(), image),
        ("mobilenet_v2", torchvision.models.mobilenet_v2(), image),
        ("vit_b_16", torchvision.models.vit_b_16(), image),
        ("bert 4 layers", Encoder(BertModel(config)), tokens),
    ]
    files = []
    for name, network, example in networks:
        path = folder / f"{name.replace(' ', '_')}_{'dynamo' if dynamo else 'script'}.onnx"
        warnings.simplefilter("ignore")
        try:
            if dynamo:
                program = torch.onnx.export(network.eval(), (example,), dynamo=True, verbose=False)
                program.save(str(path))
            else:
                torch.onnx.export(network.eval(), (example,), str(path), dynamo=False, opset_version=17)
        except Exception as error:
            print(f"{name}: cannot be exported here: {str(error).splitlines()[0][:100]}")
            continue
        files.append((path.stem, path, None))
    return files


def check(name: str, path: Path, folder: Path) -> None:
    """Convert one file and print what came of it."""
    target = folder / "out.onnx"
    start = time.perf_counter()
    report = convert(Options(str(path), str(folder / "out"), sparsity=1))
    seconds = time.perf_counter() - start
    packed = {layer.weight: layer for layer in report.layers if layer.qualifies}
    if packed:
        decompress(str(target), str(folder / "back.onnx"))
        back = (folder / "back.onnx").read_bytes() == path.read_bytes()
    else:
        back = target.read_bytes() == path.read_bytes()
    before = sum(layer.bytes_before for layer in packed.values())
    after = sum(layer.bytes_after for layer in packed.values())
    saved = report.file_bytes_before - (report.file_bytes_after or 0)
    ratio = f"{(before - saved) / before:.4f} of their size in the file" if before else "nothing compressed"
    try:
        result = run_check(str(path), str(target), random=2, repeats=1)
        equal = "bit-equal" if result.bit_equal else "DIFFERENT"
        load = f"load {result.load_s[0]:.2f} -> {result.load_s[1]:.2f} s"
    except ModelError as error:
        equal, load = "not run", str(error)[:160]
    print(
        f"{name}: {report.qualifying} of {len(report.layers)} layers, {len(packed)} weights {before:,} -> {after:,} "
        f"bytes, {ratio}; {equal}; round trip {'identical' if back else 'DIFFERENT'}; {load}; {seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", type=Path, help="folder with further .onnx files")
    parser.add_argument("--no-exports", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        if not arguments.no_exports:
            files = [entry for dynamo in (False, True) for entry in exports(folder, dynamo)]
        if arguments.real:
            files += [
                (str(path.relative_to(arguments.real)), path, None) for path in sorted(arguments.real.rglob("*.onnx"))
            ]
        for label, path, _ in files:
            if arguments.real and path.is_relative_to(arguments.real):
                check(f"{label} as it is", path, folder)
            masked = folder / "masked.onnx"
            onnx.save(mask_to_24(path), masked)
            check(f"{label} masked", masked, folder)


if __name__ == "__main__":
    main()
