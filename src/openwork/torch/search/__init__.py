"""The channel search for PyTorch models: sensitivities, latency, `auto_channel_prune_search`."""

from openwork.torch.search._blend import FisherMagnitudeSensitivity
from openwork.torch.search._fisher import FisherSensitivity
from openwork.torch.search._latency import LatencyMeter, latency_cost
from openwork.torch.search._magnitude import MagnitudeSensitivity
from openwork.torch.search._output_change import OutputChangeSensitivity
from openwork.torch.search._search import auto_channel_prune_search, get_sensitivity
from openwork.torch.search._taylor import TaylorLossSensitivity

__all__ = [
    "FisherMagnitudeSensitivity",
    "FisherSensitivity",
    "LatencyMeter",
    "MagnitudeSensitivity",
    "OutputChangeSensitivity",
    "TaylorLossSensitivity",
    "auto_channel_prune_search",
    "get_sensitivity",
    "latency_cost",
]
