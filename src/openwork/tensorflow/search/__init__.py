"""The channel search for graphs: sensitivities, `auto_channel_prune_search`."""

from openwork.tensorflow.search._fisher import FisherSensitivity
from openwork.tensorflow.search._magnitude import FisherMagnitudeSensitivity, MagnitudeSensitivity
from openwork.tensorflow.search._output_change import OutputChangeSensitivity
from openwork.tensorflow.search._search import auto_channel_prune_search, get_sensitivity
from openwork.tensorflow.search._taylor import TaylorLossSensitivity

__all__ = [
    "FisherMagnitudeSensitivity",
    "FisherSensitivity",
    "MagnitudeSensitivity",
    "OutputChangeSensitivity",
    "TaylorLossSensitivity",
    "auto_channel_prune_search",
    "get_sensitivity",
]
