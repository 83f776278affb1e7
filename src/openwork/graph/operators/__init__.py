"""The structural vocabulary that all front ends share: one operator family a file.

A front end maps its operators to these; they read and write label maps and know no framework.
"""

from openwork.graph.operators.combine import concat, pad, stack
from openwork.graph.operators.contract import contract
from openwork.graph.operators.convolution import convolution
from openwork.graph.operators.normalise import batch_norm, group_norm, layer_norm
from openwork.graph.operators.pick import embedding, select, slice_axis, split
from openwork.graph.operators.pointwise import pin_axes, pointwise, tie_vector
from openwork.graph.operators.rearrange import expand, flip, permute, repeat, repeat_interleave, squeeze_to
from openwork.graph.operators.reduce import mixed_along, reduce, window
from openwork.graph.operators.reshape import reshape

__all__ = [
    "batch_norm",
    "concat",
    "contract",
    "convolution",
    "embedding",
    "expand",
    "flip",
    "group_norm",
    "layer_norm",
    "mixed_along",
    "pad",
    "permute",
    "pin_axes",
    "pointwise",
    "reduce",
    "repeat",
    "repeat_interleave",
    "reshape",
    "select",
    "slice_axis",
    "split",
    "squeeze_to",
    "stack",
    "tie_vector",
    "window",
]
