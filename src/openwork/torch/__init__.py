"""Structured sparsity for PyTorch models.

Native interface: `analyze`, `prune`, `verify`, `PrunePlan`.
"""

from openwork.torch.analysis import Analysis, analyze
from openwork.torch.prune import PrunePlan, prune
from openwork.torch.verify import verify

__all__ = ["Analysis", "PrunePlan", "analyze", "prune", "verify"]
