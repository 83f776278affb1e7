"""Quantisation-aware training of torch models, and its ONNX files.

quantized = apply_quant(model, {"fc": QuantSetting()})   # model may carry N:M masks
...                                                      # train `quantized` as any model
layers = integers_of(quantized, inputs)
"""

from __future__ import annotations

from openwork.torch.quant.apply import apply_quant, quantizable_layers, quantized_layers
from openwork.torch.quant.deploy import LayerIntegers, deploy_model, factors_of, integers_of

__all__ = [
    "LayerIntegers",
    "apply_quant",
    "deploy_model",
    "factors_of",
    "integers_of",
    "quantizable_layers",
    "quantized_layers",
]
