"""Keras models, functional or subclassed: analysis, pruning, verification."""

from openwork.tensorflow.models.plans import PrunePlan
from openwork.tensorflow.models.prune import KerasAnalysis, analyze, prune, verify

__all__ = ["KerasAnalysis", "PrunePlan", "analyze", "prune", "verify"]
