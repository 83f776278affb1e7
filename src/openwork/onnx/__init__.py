"""ONNX files: read without copying their weights, seen through, and written whole."""
