"""Keras models, functional or subclassed: analysis, pruning, verification."""

from openwork.tensorflow.models.prune import KerasAnalysis, analyze, prune, verify

__all__ = ["KerasAnalysis", "analyze", "prune", "verify"]
