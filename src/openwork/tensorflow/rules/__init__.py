"""Rules that map TensorFlow's operators to the structural operators; one operator family a file."""

from openwork.tensorflow.rules import contractions, mixing, pointwise, shapes
from openwork.tensorflow.rules._registry import RULES, Context, NotKnown, Record, Rule, WeightUse, attribute

__all__ = [
    "RULES",
    "Context",
    "NotKnown",
    "Record",
    "Rule",
    "WeightUse",
    "attribute",
    "contractions",
    "mixing",
    "pointwise",
    "shapes",
]
