"""Accuracy of 2:4, 2:4 + INT8 and one-shot 2:4 on small images, three seeds.

    OMP_NUM_THREADS=1 python benchmarks/accuracy24.py digits
    OMP_NUM_THREADS=1 python benchmarks/accuracy24.py fashion [folder]

digits: scikit-learn's 1,797 digits, enlarged to 16x16, 1,347 to train on. fashion: Fashion-MNIST, 6,000 images to
train on and all 10,000 to test on, read from idx.gz files (Debian package dataset-fashion-mnist).

Each seed trains a dense convolutional net, then goes on for the same number of epochs dense, with 2:4 masks and
with 2:4 masks and INT8, so that all have seen as much data. The last column but one is the deploy file in
onnxruntime; one-shot columns are the trained dense net made sparse with no training after.
"""

from __future__ import annotations

import gzip
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn
from torch.nn import functional

import openwork.torch as amct
from openwork.torch.sparse24 import one_shot, verify_sparsity

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_MASKS = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: 10 } } }\n"
_QUANT = (
    "batch_num: 4\nretrain_data_quant_config { ulq_quantize { } }\n"
    "retrain_weight_quant_config { arq_retrain { channel_wise: true } }\n"
)
_COLUMNS = ("dense", "2:4", "2:4 + INT8", "deploy file", "magnitude", "Wanda", "SparseGPT")


def digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images = functional.interpolate(images, size=16, mode="bilinear")
    train, test = train_test_split(np.arange(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    target = torch.tensor(labels)
    return images[train], target[train], images[test], target[test]


def fashion(folder: str = "/usr/share/datasets/fashion-mnist") -> Data:
    def read(name: str, skip: int) -> np.ndarray:
        with gzip.open(Path(folder) / name) as stream:
            return np.frombuffer(stream.read(), dtype=np.uint8, offset=skip)

    parts: list[torch.Tensor] = []
    for name, count in (("train", 6_000), ("t10k", 10_000)):
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)[:count]
        labels = read(f"{name}-labels-idx1-ubyte.gz", 8)[:count]
        parts += [torch.tensor(images, dtype=torch.float32) / 128 - 1, torch.tensor(labels, dtype=torch.int64)]
    return parts[0], parts[1], parts[2], parts[3]


def network(width: int = 32) -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*stage(1, width), *stage(width, 2 * width), *stage(2 * width, 2 * width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(model: nn.Module, data: Data, epochs: int, rate: float, seed: int) -> nn.Module:
    images, labels = data[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batches = len(images) // 64
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: batches * 64].split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    hits = [model(x).argmax(1) == y for x, y in zip(data[2].split(256), data[3].split(256))]
    return 100 * float(torch.cat(hits).float().mean())


def accuracy_of_file(path: Path, data: Data) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    results = [session.run(None, {name: x.numpy()})[0].argmax(1) for x in data[2].split(256)]
    return 100 * float((np.concatenate(results) == data[3].numpy()).mean())


def one_seed(data: Data, epochs: int, seed: int, folder: Path) -> dict[str, float]:
    torch.manual_seed(seed)
    dense = train(network(), data, epochs, 0.05, seed)
    sample = data[0][:2]
    result = {}
    torch.save(dense.state_dict(), folder / "dense.pth")
    again = network()
    again.load_state_dict(torch.load(folder / "dense.pth", weights_only=True))
    result["dense"] = accuracy(train(again, data, epochs, 0.02, seed + 100), data)

    (folder / "masks.cfg").write_text(_MASKS)
    model = amct.create_prune_retrain_model(dense, sample, folder / "masks.cfg", folder / "masks.txt")
    result["2:4"] = accuracy(train(model, data, epochs, 0.02, seed + 100), data)
    amct.save_prune_retrain_model(model, folder / "masks", sample)
    held = verify_sparsity(folder / "masks_deploy_model.onnx").held
    assert len(held) == 3, "the second and third convolution and the linear layer hold 2:4"

    (folder / "both.cfg").write_text(_MASKS + _QUANT)
    model = amct.create_compressed_retrain_model(dense, sample, folder / "both.cfg", folder / "both.txt")
    result["2:4 + INT8"] = accuracy(train(model, data, epochs, 0.02, seed + 100), data)
    amct.save_compressed_retrain_model(
        model, folder / "both.txt", folder / "both", sample, ["image"], ["scores"], {"image": {0: "n"}}
    )
    result["deploy file"] = accuracy_of_file(folder / "both_deploy_model.onnx", data)

    batches = data[0][:512].split(128)
    for column, method in (("magnitude", "magnitude"), ("Wanda", "wanda"), ("SparseGPT", "sparsegpt")):
        result[column] = accuracy(one_shot(dense, batches, method), data)
    return result


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "digits"
    data, epochs = (digits(), 12) if name == "digits" else (fashion(*sys.argv[2:3]), 4)
    print(f"{name}, {len(data[0]):,} images to train on, {len(data[2]):,} to test on, {epochs} + {epochs} epochs\n")
    print("| seed | " + " | ".join(_COLUMNS) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    rows = []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one_seed(data, epochs, seed, Path(folder)))
        print(f"| {seed} | " + " | ".join(f"{rows[-1][column]:.2f}" for column in _COLUMNS) + " |", flush=True)
    means = {column: statistics.mean(row[column] for row in rows) for column in _COLUMNS}
    print("| mean | " + " | ".join(f"{means[column]:.2f}" for column in _COLUMNS) + " |")
    print(f"\n2:4 minus dense: {means['2:4'] - means['dense']:+.2f} points")
    print(f"2:4 + INT8 minus dense: {means['2:4 + INT8'] - means['dense']:+.2f} points")
    apart = max(abs(row["deploy file"] - row["2:4 + INT8"]) for row in rows)
    print(f"deploy file and torch apart by at most {apart:.2f} points")


if __name__ == "__main__":
    main()
