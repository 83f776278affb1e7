"""TensorFlow: the same system on tf.Graph.

AMCT's interface: ``import openwork.tensorflow as amct``.
"""

from openwork.retrain.logs import set_logging_level
from openwork.tensorflow.create import create_prune_retrain_model
from openwork.tensorflow.save import save_prune_retrain_model

__all__ = [
    "create_prune_retrain_model",
    "save_prune_retrain_model",
    "set_logging_level",
]
