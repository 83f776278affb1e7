"""Structured sparsity for PyTorch models.

Native interface: `analyze`, `prune`, `verify`, `PrunePlan`. AMCT's interface: ``import openwork.torch as amct``.
"""

from openwork.torch.analysis import Analysis, analyze
from openwork.torch.prune import PrunePlan, prune
from openwork.torch.retrain import (
    create_compressed_retrain_model,
    create_prune_retrain_model,
    restore_compressed_retrain_model,
    restore_prune_retrain_model,
    save_compressed_retrain_model,
    save_prune_retrain_model,
    set_logging_level,
)
from openwork.torch.search import auto_channel_prune_search
from openwork.torch.sparse24 import verify_sparsity
from openwork.torch.verify import verify

__all__ = [
    "Analysis",
    "PrunePlan",
    "analyze",
    "auto_channel_prune_search",
    "create_compressed_retrain_model",
    "create_prune_retrain_model",
    "prune",
    "restore_compressed_retrain_model",
    "restore_prune_retrain_model",
    "save_compressed_retrain_model",
    "save_prune_retrain_model",
    "set_logging_level",
    "verify",
    "verify_sparsity",
]
