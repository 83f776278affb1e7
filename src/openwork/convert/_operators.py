"""TensorFlow operators that tf2onnx does not know: mapped here, or named in an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from openwork.errors import ConversionError

__all__ = ["add_operators", "refuse_foreign"]


def add_operators() -> None:
    """Teach tf2onnx the complementary error function, which Keras' gelu is made of."""
    from tf2onnx import utils
    from tf2onnx.handler import tf_op

    @tf_op("Erfc")
    class _Erfc:
        @classmethod
        def version_9(cls, ctx: Any, node: Any, **kwargs: Any) -> None:
            (made,) = node.output
            dtype, shape = ctx.get_dtype(made), ctx.get_shape(made)
            erf = ctx.make_node("Erf", [node.input[0]], shapes=[shape], dtypes=[dtype])
            one = ctx.make_const(utils.make_name("one"), np.array(1, dtype=utils.map_onnx_to_numpy_type(dtype)))
            ctx.remove_node(node.name)
            ctx.make_node(
                "Sub", [one.output[0], erf.output[0]], outputs=[made], name=node.name, shapes=[shape], dtypes=[dtype]
            )


def refuse_foreign(path: str) -> None:
    """Raise if a file that tf2onnx wrote holds operators that it passed on as they were.

    Raises:
        ConversionError: names the operators.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    plain = ("", "ai.onnx")
    known = {domain.domain: domain.version for domain in model.opset_import}
    version = max((known[domain] for domain in plain if domain in known), default=onnx.defs.onnx_opset_version())
    found = {
        node.op_type: node.name
        for node in _nodes(model.graph)
        if node.domain in plain and not onnx.defs.has(node.op_type, max_inclusive_version=version)
    }
    if found:
        places = ", ".join(f"{kind} ({name})" for kind, name in list(found.items())[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        hint = "; save_compressed_retrain_model makes a graph without them" if "FakeQuant" in places else ""
        raise ConversionError(f"tf2onnx knows no ONNX operators for {places}{more}{hint}")


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
