"""TensorFlow: the same system on tf.Graph.

AMCT's interface: ``import openwork.tensorflow as amct``. Keras models: `analyze`, `prune`, `verify`; frozen graphs:
`analyze_graph`, `prune_graph`, `verify_graph`; SavedModels: `prune_saved_model`.
"""

from openwork.retrain.logs import set_logging_level
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.compressed import create_compressed_retrain_model, save_compressed_retrain_model
from openwork.tensorflow.create import create_prune_retrain_model
from openwork.tensorflow.models import KerasAnalysis, PrunePlan, analyze, prune, verify
from openwork.tensorflow.pruning import prune_graph
from openwork.tensorflow.save import save_prune_retrain_model
from openwork.tensorflow.saved_model import prune_saved_model
from openwork.tensorflow.search import auto_channel_prune_search
from openwork.tensorflow.verification import verify_graph

__all__ = [
    "GraphAnalysis",
    "KerasAnalysis",
    "PrunePlan",
    "analyze",
    "analyze_graph",
    "auto_channel_prune_search",
    "create_compressed_retrain_model",
    "create_prune_retrain_model",
    "prune",
    "prune_graph",
    "prune_saved_model",
    "save_compressed_retrain_model",
    "save_prune_retrain_model",
    "set_logging_level",
    "verify",
    "verify_graph",
]
