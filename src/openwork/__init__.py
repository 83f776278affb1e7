"""Structured sparsity for neural networks, on any hardware.

The frameworks live in their own packages, imported only when asked for: `openwork.torch`, `openwork.onnx`,
`openwork.tensorflow`.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
