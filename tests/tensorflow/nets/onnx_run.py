"""Frozen graphs in onnxruntime, by way of tf2onnx."""

from __future__ import annotations

import logging

import onnxruntime
import tf2onnx

logging.getLogger("tf2onnx").setLevel(logging.ERROR)


def run_onnx(graph_def, feeds, outputs):
    """Outputs of a frozen graph, converted with tf2onnx and run in onnxruntime."""
    model, _ = tf2onnx.convert.from_graph_def(graph_def, input_names=list(feeds), output_names=list(outputs), opset=17)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(list(outputs), dict(feeds))
