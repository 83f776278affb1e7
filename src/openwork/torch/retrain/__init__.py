"""AMCT's flow: create, retrain, restore, save."""

from openwork.retrain.logs import set_logging_level
from openwork.torch.retrain.compressed import (
    create_compressed_retrain_model,
    restore_compressed_retrain_model,
    save_compressed_retrain_model,
)
from openwork.torch.retrain.flow import (
    create_prune_retrain_model,
    restore_prune_retrain_model,
    save_prune_retrain_model,
)

__all__ = [
    "create_compressed_retrain_model",
    "create_prune_retrain_model",
    "restore_compressed_retrain_model",
    "restore_prune_retrain_model",
    "save_compressed_retrain_model",
    "save_prune_retrain_model",
    "set_logging_level",
]
