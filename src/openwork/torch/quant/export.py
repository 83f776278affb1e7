"""Write the deploy and fake-quant files of a quantised model: both whole, or none."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from openwork.config import Target
from openwork.files import atomic_path
from openwork.torch.quant.deploy import LayerIntegers, deploy_model
from openwork.torch.quant.folding import evaluating
from openwork.torch.quant.onnx_files import to_ascend, to_fake_quant, to_integer_weights
from openwork.torch.retrain.check_file import QUANTISED_TOLERANCE, warn_if_different
from openwork.torch.retrain.export import export_onnx
from openwork.torch.structure import bind_inputs, check_forward

__all__ = ["export_quantized"]


def export_quantized(
    model: nn.Module,
    layers: dict[str, LayerIntegers],
    paths: Sequence[Path],
    input_data: tuple[Any, ...],
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    opset: int = 18,
    target: Target = Target.ONNX,
) -> None:
    """Write the files of a model from `apply_quant`.

    Args:
        model: the trained model.
        layers: from `integers_of`.
        paths: of the deploy file and the fake-quant file; their folders exist.
        input_data: positional inputs; those of other float types are given as float32.
        input_names, output_names, dynamic_axes, opset: as for `export_onnx`.
        target: what the deploy file is for.

    Raises:
        ConfigError, ModelError, FileError: as `export_onnx`.
    """
    import onnx

    with evaluating(model):
        expected = check_forward(model, tuple(input_data))
    plain = deploy_model(model, layers)
    # The files compute in float32, whatever the model was cast to.
    input_data = (
        bind_inputs(input_data).to(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor).args
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(plain, [path], input_data, input_names, output_names, dynamic_axes, opset, compared=False)
        exported = onnx.load(path)
    deploy = to_ascend(exported) if target is Target.ASCEND else to_integer_weights(exported)
    files = [deploy, to_fake_quant(exported)]
    for file in files:
        if file is not deploy or target is not Target.ASCEND:
            # Ascend's operators are not ONNX's own.
            onnx.checker.check_model(file)
    with ExitStack() as stack:
        for file, target_path in zip(files, paths):
            temporary = stack.enter_context(atomic_path(target_path))
            temporary.write_bytes(file.SerializeToString())
            if file is not deploy or target is not Target.ASCEND:
                warn_if_different(temporary, input_data, expected, QUANTISED_TOLERANCE, target_path)
