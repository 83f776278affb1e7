"""TensorFlow: the same system on tf.Graph.

AMCT's interface: ``import openwork.tensorflow as amct``.
"""

from openwork.retrain.logs import set_logging_level
from openwork.tensorflow.create import create_prune_retrain_model
from openwork.tensorflow.save import save_prune_retrain_model
from openwork.tensorflow.search import auto_channel_prune_search

__all__ = [
    "auto_channel_prune_search",
    "create_prune_retrain_model",
    "save_prune_retrain_model",
    "set_logging_level",
]
